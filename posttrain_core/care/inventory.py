"""What lies under a run's prefix, and what its manifests reach. Everything is told by keys and manifests."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from posttrain_core import layout
from posttrain_core.errors import ObjectNotFound, PosttrainError
from posttrain_core.inspect import tables
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, ObjectRef, parse_manifest
from posttrain_core.records import Purpose
from posttrain_core.schema import corrupt
from posttrain_core.store.protocol import ObjectInfo, ObjectStore

A = TypeVar("A")
B = TypeVar("B")

START = Scope(-1)  # what comes before the first iteration: sft, publish
STAGE_OF_TABLE = tables.STAGE_OF_TABLE | {"journal": "generate"}
NUM_READERS = 16

_SCOPE = r"^runs/[^/]+/(?:(eval|audit)/)?"
_MANIFEST = re.compile(_SCOPE + r"manifests/(?:iteration=(\d+)|start)/(\w+)\.json$")
_TABLE = re.compile(_SCOPE + r"(plan|rollouts|executions|verdicts|samples|journal)/(?:set=[^/]+/)?iteration=(\d+)/")
_WEIGHTS = re.compile(r"^runs/[^/]+/(checkpoints|policies)/\w+=(\d+)/attempt=[^/]+/")
_TOMBSTONE = re.compile(r"^runs/[^/]+/retired/(checkpoints|policies)/(\d+)\.json$")


class Place(NamedTuple):
    """The stage that a manifest or a table belongs to."""

    scope: Scope
    stage: str


@dataclass
class Shelf:
    """The objects of one run by key. `manifests` holds those that could be read, `unreadable` why others could not."""

    store: ObjectStore
    run: str
    objects: dict[str, ObjectInfo]
    manifests: dict[Place, Manifest] = field(default_factory=dict)
    unreadable: dict[str, PosttrainError] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        return layout.run_record(self.run) in self.objects

    @property
    def deleted(self) -> bool:
        """Marked as such. A run that only lacks its `run.json` is damaged, or a fork that was cut short."""
        return layout.deletion(self.run) in self.objects and not self.exists

    @property
    def retired(self) -> set[tuple[str, int]]:
        found = filter(None, map(_TOMBSTONE.match, self.objects))
        return {(match[1], int(match[2])) for match in found}

    @property
    def notes(self) -> list[str]:
        """The keys of the notes about forks that need objects of this run."""
        return [key for key in self.objects if key.startswith(layout.forks(self.run))]

    def read(self, known: Mapping[str, Manifest]) -> dict[str, Manifest]:
        """Read the manifests but those that are known, which do not change. Returns all of them by key."""
        places = {key: place for key in self.objects if (place := manifest_place(key))}
        missing = [key for key in places if key not in known]
        found = {key: known[key] for key in places if key in known}
        for key, manifest in zip(missing, in_parallel(self._read, missing), strict=True):
            if isinstance(manifest, Manifest):
                found[key] = manifest
            else:
                self.unreadable[key] = manifest
        self.manifests = {places[key]: manifest for key, manifest in found.items()}
        return found

    def named(self) -> dict[str, ObjectRef]:
        """What the manifests name, without the weights that are retired in this run."""
        retired = self.retired
        refs = {ref.key: ref for manifest in self.manifests.values() for ref in manifest.objects}
        return {key: ref for key, ref in refs.items() if weights(key) not in retired}

    def policy(self, version: int) -> Manifest | None:
        """The publish manifest of a policy version."""
        return self.manifests.get(Place(Scope(version - 1), "publish"))

    def _read(self, key: str) -> Manifest | PosttrainError:
        try:
            return parse_manifest(self.store.get(key), key)
        except PosttrainError as error:
            return error


def shelf(store: ObjectStore, run: str) -> Shelf:
    return Shelf(store, run, {info.key: info for info in store.list(layout.run_prefix(run))})


def shelves(store: ObjectStore) -> dict[str, Shelf]:
    """Of every run, by its name."""
    found: dict[str, Shelf] = {}
    for info in store.list("runs/"):
        run = layout.run_of(info.key)
        found.setdefault(run, Shelf(store, run, {})).objects[info.key] = info
    return found


def read_note(store: ObjectStore, key: str) -> dict[str, Any] | None:
    """What a fork wrote: fork, parent, at, objects. None when it is gone; ObjectCorrupt when it cannot be read."""
    try:
        note: dict[str, Any] = json.loads(store.get(key))
        _ = note["fork"], note["parent"], note["objects"]
    except ObjectNotFound:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise corrupt(key, f"it is not a note about a fork ({error!r})") from error
    return note


def manifest_place(key: str) -> Place | None:
    match = _MANIFEST.match(key)
    if match is None:
        return None
    return Place(Scope(int(match[2]), _purpose(match[1])) if match[2] else START, match[3])


def table_place(key: str) -> Place | None:
    """Of a table's shard or a part of a journal: the stage whose manifest decides about it."""
    match = _TABLE.match(key)
    return match and Place(Scope(int(match[3]), _purpose(match[1])), STAGE_OF_TABLE[match[2]])


def weights(key: str) -> tuple[str, int] | None:
    """ "checkpoints" or "policies", and the number."""
    match = _WEIGHTS.match(key)
    return match and (match[1], int(match[2]))


def in_parallel(call: Callable[[A], B], items: Iterable[A]) -> list[B]:
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(call, items))


def _purpose(folder: str | None) -> Purpose:
    return Purpose(folder) if folder else Purpose.TRAIN
