"""fsck: is everything there that a run's manifests name, as it was committed, and does it fit together?

Reads every byte of the run once: run record, manifests (checksum, digest, place), objects (size, digest, and of
tables the seal, schema and rows), lineage (each manifest and each shard names the digests of what it was made from, and
the settings of the run), counts (the same rollouts in the same order from plan to verdicts), tombstones.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from posttrain_core import layout
from posttrain_core.care.contents import Seen, check_contents, look_at
from posttrain_core.care.findings import Finding
from posttrain_core.care.inventory import START, Place, Shelf, in_parallel, manifest_place, read_note, shelf
from posttrain_core.care.lineage import check_lineage
from posttrain_core.config import RunConfig
from posttrain_core.errors import ConfigError, PosttrainError
from posttrain_core.records import Purpose
from posttrain_core.store.protocol import ObjectStore

_STAGES = ("plan", "generate", "execute", "verify", "update", "publish")


@dataclass(frozen=True)
class Checked:
    """`num_leftovers` and `leftover_bytes`: objects under the run's prefix that no manifest names (uncommitted shards,
    attempts, journals), which is no fault; `posttrain gc` knows which of them nothing needs."""

    run: str
    findings: list[Finding]
    num_manifests: int
    num_objects: int
    num_bytes: int
    num_rows: int
    num_leftovers: int
    leftover_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check_run(store: ObjectStore, run: str, progress: Callable[[int, int], None] = lambda done, total: None) -> Checked:
    """Everything that is wrong with a run. ConfigError when there is nothing of that name."""
    found = shelf(store, run)
    if not found.objects:
        raise ConfigError(f"no run {run!r} in {store.url}")
    found.read({})
    record, findings = _record(found)
    findings += _unreadable(found) + _misplaced(found) + _missing_stages(found) + _tombstones(found) + _notes(found)
    named = found.named()
    done = count(1)

    def look(key: str) -> Seen | Finding:
        seen = look_at(store, named[key], run)
        progress(next(done), len(named))
        return seen

    seen = dict(zip(named, in_parallel(look, named), strict=True))
    findings += check_contents(named, seen)
    findings += check_lineage(found, record, {key: item for key, item in seen.items() if isinstance(item, Seen)})
    leftovers = [info for key, info in found.objects.items() if key not in named and _is_product(key)]
    return Checked(
        run,
        findings,
        len(found.manifests),
        len(named),
        sum(ref.num_bytes for ref in named.values()),
        sum(max(0, ref.num_rows) for ref in named.values()),
        len(leftovers),
        sum(info.num_bytes for info in leftovers),
    )


def _record(found: Shelf) -> tuple[dict[str, Any] | None, list[Finding]]:
    key = layout.run_record(found.run)
    if not found.exists:
        return None, [Finding(key, "it is gone: nobody finds the run without it", "Put it back from a copy")]
    try:
        record: dict[str, Any] = json.loads(found.store.get(key))
        name = RunConfig.model_validate(record["config"]).run
        for settings in _origins(record):
            RunConfig.model_validate(settings)
    except (PosttrainError, ValueError, KeyError, TypeError) as error:
        return None, [Finding(key, f"it is not the record of a run ({error})", "Put it back from a copy")]
    if name != found.run:
        what = f"it is the record of run {name!r}: the folder was renamed or copied"
        return None, [Finding(key, what, "Name the folder back")]
    return record, []


def _origins(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of the runs that this one was forked from, directly and before."""
    found, origin = [], record.get("fork")
    while origin is not None:
        found.append(origin["config"])
        origin = origin["before"]
    return found


def _unreadable(found: Shelf) -> list[Finding]:
    return [
        Finding(
            key,
            f"this manifest cannot be used: {str(error).partition('. Nothing was')[0]}",
            "It was damaged, or edited by hand. Put it back from a copy; what it names cannot be checked without it",
        )
        for key, error in found.unreadable.items()
    ]


def _misplaced(found: Shelf) -> list[Finding]:
    """A manifest says what it is of; its own digest is there for readers without this code."""
    findings = []
    for place, manifest in found.manifests.items():
        key = key_of(found.run, place)
        if (manifest.stage, manifest.iteration) != (place.stage, place.scope.iteration):
            what = f"it is the manifest of {manifest.stage}, iteration {manifest.iteration}"
            findings.append(Finding(key, what, "It was copied or moved. Put the right one back from a copy"))
        recorded = json.loads(found.store.get(key))["digest"]
        if recorded != manifest.digest:
            what = f"its digest {recorded[:12]} is not that of its contents ({manifest.digest[:12]})"
            findings.append(Finding(key, what, "It was edited. Put it back from a copy"))
    return findings


def _missing_stages(found: Shelf) -> list[Finding]:
    """Stages follow each other, and so do iterations: before the last manifest there is no gap."""
    known = found.manifests.keys() | set(filter(None, map(manifest_place, found.unreadable)))
    expected: set[Place] = set()
    trained = [place.scope.iteration for place in known if place.scope.purpose is Purpose.TRAIN]
    if known:
        expected.add(Place(START, "publish"))
    for place in known:
        if place.scope != START and place.stage in _STAGES:
            expected |= {Place(place.scope, stage) for stage in _STAGES[: _STAGES.index(place.stage)]}
    for iteration in range(max(trained, default=0)):
        expected |= {Place(layout.Scope(iteration), stage) for stage in _STAGES}
    return [
        Finding(
            key_of(found.run, place),
            "this manifest is gone, though there are later ones: what it names looks uncommitted",
            "Put it back from a copy. Do not run gc before: it may delete what the manifest named",
        )
        for place in sorted(expected - known, key=lambda place: key_of(found.run, place))
    ]


def _tombstones(found: Shelf) -> list[Finding]:
    """The versions that every resume needs are never retired."""
    versions = [place.scope.iteration + 1 for place in found.manifests if place.stage == "publish"]
    versions = [version for version in versions if ("policies", version) in found.retired]
    newest = max((p.scope.iteration + 1 for p in found.manifests if p.stage == "publish"), default=0)
    return [
        Finding(
            layout.retired(found.run, "policies", version),
            f"policy version {version} is marked as retired, but the run needs it to go on",
            "The mark was not made by the retention of this run. If its objects are there, delete the mark",
        )
        for version in sorted({0, newest} & set(versions))
    ]


def _notes(found: Shelf) -> list[Finding]:
    findings = []
    for key in found.notes:
        try:
            read_note(found.store, key)
        except PosttrainError:
            what = "this note about a fork cannot be read: retention stops at it"
            findings.append(Finding(key, what, "Put it back from a copy, or delete it when there is no such fork"))
    return findings


def _is_product(key: str) -> bool:
    """Neither bookkeeping nor telemetry."""
    folders = key.split("/")[2:-1]
    return bool(folders) and not {"manifests", "telemetry", "retired", "forks"} & set(folders)


def key_of(run: str, place: Place) -> str:
    if place.scope == START:
        return layout.start_manifest(run, place.stage)
    return layout.manifest(run, place.scope, place.stage)
