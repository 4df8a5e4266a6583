"""gc: removes what nothing needs any more.

Needed is what a committed manifest of any run names (weights that the run retired excepted), what an alias points at
(retired, or of a deleted run: even then), and what may still come to be used: the shards of a stage that is not
committed are adopted on resume, and so is the journal of a shard.
Never touched: run records, manifests, leases, tombstones, telemetry (but of runs that `delete` marked as deleted), and
keys that are not ours.

Safe beside live runs. What cannot be committed any more (its manifest is there and names other objects) may go at any
time. An attempt that may still commit goes only while this process holds the run's lease. All of it must be older than
the grace period, by the store's own clock on both sides: the present is the time at which the store says that a probe
was written, so the clock of this machine does not matter. Before anything is deleted, everything is looked at again.
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from posttrain_core import layout
from posttrain_core.care.inventory import (
    START,
    Place,
    Shelf,
    in_parallel,
    read_note,
    shelf,
    shelves,
    table_place,
    weights,
)
from posttrain_core.errors import ObjectNotFound, RunConflict, StoreError
from posttrain_core.layout import Scope
from posttrain_core.lease import Lease
from posttrain_core.manifest import Manifest
from posttrain_core.registry import reached
from posttrain_core.store.protocol import ObjectInfo, ObjectStore

GRACE_SECONDS = 24 * 3600.0
_FORK_SECONDS = 3600.0  # a fork that is being made is done by then
_PROBES = "gc/"


class Kind(StrEnum):
    RETIRED = "weights that were retired"
    LOST = "attempts at weights that another attempt won"
    UNFINISHED = "attempts at weights that were cut short"
    TABLE = "tables that the stage's manifest does not name"
    JOURNAL = "journals of shards that are committed"
    NOTE = "notes about forks that are no more"
    GONE = "objects of runs that were deleted"


UNDER_LEASE = {Kind.UNFINISHED, Kind.GONE}


@dataclass(frozen=True)
class Garbage:
    key: str
    num_bytes: int
    run: str
    kind: Kind


@dataclass(frozen=True)
class Removed:
    """`left` are runs that another process holds, with the garbage that can go only when they are at rest."""

    garbage: list[Garbage]
    left: dict[str, list[Garbage]]


def find_garbage(store: ObjectStore, grace: float = GRACE_SECONDS) -> list[Garbage]:
    """What could be removed now. Raises ObjectCorrupt when a manifest of any run cannot be read: who knows what it
    names."""
    return _Sweep(store, grace).look()


def remove_garbage(
    store: ObjectStore, grace: float = GRACE_SECONDS, progress: Callable[[int, int], None] = lambda done, total: None
) -> Removed:
    """Find it and delete it."""
    sweep = _Sweep(store, grace)
    first = {item.key for item in sweep.look()}
    sure = [item for item in sweep.look() if item.key in first]
    removed = [item for item in sure if item.kind not in UNDER_LEASE]
    _delete(store, [item.key for item in removed])
    progress(len(removed), len(sure))
    by_run: dict[str, list[Garbage]] = defaultdict(list)
    for item in sure:
        if item.kind in UNDER_LEASE:
            by_run[item.run].append(item)
    left: dict[str, list[Garbage]] = {}
    for run, items in by_run.items():
        try:
            removed += _delete_at_rest(store, run, items)
        except RunConflict:
            left[run] = items
        progress(len(removed), len(sure))
    for info in list(store.list(_PROBES)):
        if sweep.now - info.modified >= max(grace, _FORK_SECONDS):
            store.delete(info.key)
    return Removed(removed, left)


def _delete_at_rest(store: ObjectStore, run: str, items: list[Garbage]) -> list[Garbage]:
    """Under the run's lease: nobody commits meanwhile. RunConflict when another process holds it."""
    with Lease(store, run) as lease:
        now = shelf(store, run)
        now.read({})
        if now.unreadable and not now.deleted:
            raise next(iter(now.unreadable.values()))
        named = {} if now.deleted else now.named()
        todo = [item for item in items if item.key not in named and now.deleted == (item.kind is Kind.GONE)]
        for start in range(0, len(todo), 100):
            lease.check()
            _delete(store, [item.key for item in todo[start : start + 100]])
    return todo


def _delete(store: ObjectStore, keys: list[str]) -> None:
    in_parallel(store.delete, keys)


class _Sweep:
    """Looks at the whole store; remembers manifests, which do not change."""

    def __init__(self, store: ObjectStore, grace: float) -> None:
        self.store, self.grace = store, grace
        self.now = _store_time(store)
        self._known: dict[str, Manifest] = {}

    def look(self) -> list[Garbage]:
        found = shelves(self.store)
        for run in found.values():
            if not run.deleted:
                self._read(run)
        needed = {key for run in found.values() if not run.deleted for key in run.named()}
        needed |= set(self._needed_by_new_forks(found)) | reached(self.store)
        return [
            Garbage(info.key, info.num_bytes, run.run, kind)
            for run in found.values()
            for info in run.objects.values()
            if info.key not in needed
            and self.now - info.modified >= self.grace
            and (kind := self._kind(run, info, found))
        ]

    def _read(self, run: Shelf) -> None:
        self._known |= run.read(self._known)
        for error in run.unreadable.values():
            if not isinstance(error, ObjectNotFound):
                raise error

    def _needed_by_new_forks(self, found: Mapping[str, Shelf]) -> Iterator[str]:
        """What a fork in the making will name: it has left its note, but has no manifests of its own yet."""
        for run in found.values():
            for key in run.notes:
                note = read_note(self.store, key)
                if note is None or _exists(note["fork"], found) or self._is_void(run.objects[key], note["fork"], found):
                    continue
                yield from note["objects"]
                if parent := found.get(note["parent"]):
                    self._read(parent)
                    yield from (ref.key for manifest in parent.manifests.values() for ref in manifest.objects)

    def _is_void(self, info: ObjectInfo, fork: str, found: Mapping[str, Shelf]) -> bool:
        return not _exists(fork, found) and self.now - info.modified >= max(self.grace, _FORK_SECONDS)

    def _kind(self, run: Shelf, info: ObjectInfo, found: Mapping[str, Shelf]) -> Kind | None:
        """What kind of garbage an object is that no manifest names; None when it is none."""
        key = info.key
        if key == layout.lease(run.run):
            return None
        if run.deleted:
            is_last = run.objects.keys() <= {layout.deletion(run.run), layout.lease(run.run)}
            return Kind.GONE if key != layout.deletion(run.run) or is_last else None
        if key.startswith(layout.forks(run.run)):
            fork = key.removeprefix(layout.forks(run.run)).removesuffix(".json")
            return Kind.NOTE if self._is_void(info, fork, found) else None
        if place := table_place(key):
            if place not in run.manifests:
                return None
            return Kind.JOURNAL if "/journal/" in key else Kind.TABLE
        if (what := weights(key)) is None:
            return None
        if what in run.retired:
            return Kind.RETIRED
        return Kind.LOST if _committed(*what) in run.manifests else Kind.UNFINISHED


def _exists(run: str, found: Mapping[str, Shelf]) -> bool:
    return run in found and found[run].exists


def _committed(kind: str, number: int) -> Place:
    """The manifest that names the weights which count."""
    if kind == "checkpoints":
        return Place(Scope(number), "update")
    return Place(Scope(number - 1) if number else START, "publish")


def _store_time(store: ObjectStore) -> float:
    """The present by the store's clock."""
    key = f"{_PROBES}{uuid.uuid4().hex}.json"
    store.put_volatile(key, b"{}")
    try:
        info = store.stat(key)
    finally:
        store.delete(key)
    if info is None:
        raise StoreError(f"{key} in {store.url} was written and is not there: is another program deleting objects?")
    return info.modified
