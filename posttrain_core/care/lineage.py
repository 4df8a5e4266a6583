"""Lineage and counts: what was made from what, with which settings, and whether the rows still go together.

Edges between manifests: plan <- policy; generate <- plan; execute <- generate; verify <- execute; update <- verify,
policy; publish <- update. Edges between shards: rollouts <- plan, policy; executions <- plan, rollouts; verdicts <-
plan, rollouts, executions; the footers of the other tables repeat their manifest's fingerprint.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow.compute as pc

from posttrain_core import layout
from posttrain_core.care.contents import Seen
from posttrain_core.care.findings import Finding
from posttrain_core.care.inventory import START, Place, Shelf
from posttrain_core.config import RunConfig
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, ObjectRef, fingerprint
from posttrain_core.records import Outcome, Purpose
from posttrain_core.schema import SCHEMA_VERSION
from posttrain_core.stages.context import semantic_settings

_EDGES = {
    "plan": ("policy",),
    "generate": ("plan",),
    "execute": ("generate",),
    "verify": ("execute",),
    "update": ("verify", "policy"),
    "publish": ("update",),
}
_SHARD_EDGES = {
    "plan": (),
    "generate": ("plan", "policy"),
    "execute": ("plan", "rollouts"),
    "verify": ("plan", "rollouts", "executions"),
}
_TABLES = {"plan": "plan", "generate": "rollouts", "execute": "executions", "verify": "verdicts"}  # stage -> table
_REMEDY = "One of the two was replaced or edited. Put it back from a copy, or fork the run from before it"


def check_lineage(shelf: Shelf, record: Mapping[str, Any] | None, seen: Mapping[str, Seen]) -> list[Finding]:
    """`seen` are the objects that could be read; what is missing or damaged is not judged again here."""
    findings: list[Finding] = []
    for place, manifest in shelf.manifests.items():
        findings += _edges(shelf, place, manifest)
        if record is not None:
            findings += _settings(shelf, place, manifest, record)
    for scope in {place.scope for place in shelf.manifests}:
        findings += _shards(shelf, scope, seen)
        findings += _counts(shelf, scope, seen)
    return sorted(findings, key=lambda finding: finding.key)


# --- manifests --------------------------------------------------------------------------------------------------


def _edges(shelf: Shelf, place: Place, manifest: Manifest) -> Iterator[Finding]:
    key = _key(shelf, place)
    if (version := manifest.fingerprint.get("schema")) != SCHEMA_VERSION:
        what = f"it was made with schema version {version}; this program reads {SCHEMA_VERSION}"
        yield Finding(key, what, f"Use the version of posttrain that made it ({manifest.code_version or 'unknown'})")
    if place.scope == START:
        return
    for name in _EDGES.get(place.stage, ()):
        source = _source(shelf, place.scope, name)
        if source is not None and manifest.fingerprint.get(f"input.{name}") != source.digest:
            yield _other_source(key, name, manifest.fingerprint.get(f"input.{name}"), source.digest)
    planned = shelf.manifests.get(Place(place.scope, "plan"))
    if place.stage == "verify" and planned is not None:
        verifiers, known = (m.fingerprint.get("input.verifiers") for m in (manifest, planned))
        if verifiers != known:
            what = f"its verdicts are by verifiers {verifiers}; the plan was made for {known}"
            yield Finding(key, what, _REMEDY)


def _source(shelf: Shelf, scope: Scope, name: str) -> Manifest | None:
    return shelf.policy(scope.iteration) if name == "policy" else shelf.manifests.get(Place(scope, name))


def _settings(shelf: Shelf, place: Place, manifest: Manifest, record: Mapping[str, Any]) -> Iterator[Finding]:
    """The semantic settings in a fingerprint are those of the run; of a fork's shared part, those of the parent."""
    given = {name: value for name, value in manifest.fingerprint.items() if name.startswith("config.")}
    allowed = list(_settings_of(record, place.scope))
    wrong = [{name for name in given if name in config and config[name] != given[name]} for config in allowed]
    if all(wrong):
        name = min(wrong[0])
        what = f"it was made with {name.removeprefix('config.')} {given[name]!r}; run.json says {allowed[0][name]!r}"
        yield Finding(_key(shelf, place), what, "run.json or the manifest was edited. Put it back from a copy")


def _settings_of(record: Mapping[str, Any], scope: Scope) -> Iterator[dict[str, Any]]:
    """An evaluation of the version at which a run was forked may be the parent's or its own."""
    config, origin = record["config"], record.get("fork")
    while origin is not None and scope.iteration <= origin["at"]:
        if scope.purpose is not Purpose.TRAIN and scope.iteration == origin["at"]:
            yield _flat(config)
        elif scope.iteration == origin["at"]:
            break
        config, origin = origin["config"], origin["before"]
    yield _flat(config)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = fingerprint({}, semantic_settings(RunConfig.model_validate(config)))
    flat: dict[str, Any] = json.loads(json.dumps(settings, default=dict))
    return flat


# --- shards -----------------------------------------------------------------------------------------------------


def _shards(shelf: Shelf, scope: Scope, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    """The fingerprint in each table's footer."""
    policy = shelf.policy(scope.iteration) if scope != START else None
    for place, manifest in shelf.manifests.items():
        if place.scope != scope:
            continue
        for number, ref in enumerate(_tables(manifest)):
            footer = _sound(seen, ref)
            if footer is None or footer.fingerprint is None:
                continue
            if not _SHARD_EDGES.get(place.stage):
                if dict(footer.fingerprint) != json.loads(json.dumps(manifest.fingerprint, default=dict)):
                    yield Finding(ref.key, "its footer has another fingerprint than its manifest", _REMEDY)
                continue
            for name in _SHARD_EDGES[place.stage]:
                expected = (
                    policy.digest if name == "policy" and policy else _digest_of_shard(shelf, scope, name, number)
                )
                if expected and (found := footer.fingerprint.get(f"input.{name}")) != expected:
                    yield _other_source(ref.key, name, found, expected)


def _digest_of_shard(shelf: Shelf, scope: Scope, table: str, number: int) -> str:
    stage = next((stage for stage, name in _TABLES.items() if name == table), "")
    manifest = shelf.manifests.get(Place(scope, stage))
    tables = _tables(manifest) if manifest else []
    return tables[number].digest if number < len(tables) else ""


# --- rows -------------------------------------------------------------------------------------------------------


def _counts(shelf: Shelf, scope: Scope, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    planned = shelf.manifests.get(Place(scope, "plan"))
    if planned is None:
        return
    plan = _tables(planned)
    yield from _total(shelf, Place(scope, "plan"), {"rollouts": sum(ref.num_rows for ref in plan)})
    groups = [item.groups for ref in plan if (item := _sound(seen, ref))]
    if len(groups) == len(plan):
        yield from _total(shelf, Place(scope, "plan"), {"groups": sum(groups)})
    for stage, table in list(_TABLES.items())[1:]:
        manifest = shelf.manifests.get(Place(scope, stage))
        if manifest is None:
            continue
        shards = _tables(manifest)
        if len(shards) != len(plan):
            what = f"it names {len(shards)} shards; the plan has {len(plan)}"
            yield Finding(_key(shelf, Place(scope, stage)), what, _REMEDY)
            continue
        for source, ref in zip(plan, shards, strict=True):
            yield from _same_rows(table, source, ref, seen)
        if stage == "verify":
            yield from _verdicts(shelf, scope, [_sound(seen, ref) for ref in shards])
    yield from _samples(shelf, scope, seen)


def _same_rows(table: str, plan: ObjectRef, ref: ObjectRef, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    if plan.num_rows != ref.num_rows:
        what = f"it has {ref.num_rows} {table}; its plan {plan.key} has {plan.num_rows} rows"
        yield Finding(ref.key, what, _REMEDY)
        return
    expected, found = _sound(seen, plan), _sound(seen, ref)
    if expected is None or found is None or expected.ids is None or found.ids is None:
        return
    differs = pc.index(pc.not_equal(expected.ids, found.ids), True).as_py()
    if differs >= 0:
        what = (
            f"row {differs} is of rollout {found.ids[differs]}; its plan {plan.key} has {expected.ids[differs]} there"
        )
        yield Finding(ref.key, what, _REMEDY)


def _verdicts(shelf: Shelf, scope: Scope, tables: list[Seen | None]) -> Iterator[Finding]:
    """The counts in the manifest are those of the verdicts."""
    outcomes = [table.outcomes for table in tables if table is not None and table.outcomes is not None]
    if len(outcomes) != len(tables):
        return
    counts: dict[str, float] = {name: sum(part.get(name, 0) for part in outcomes) for name in map(str, Outcome)}
    judged = counts[Outcome.SCORED] + counts[Outcome.TRUNCATED]
    if judged:
        counts["reward_mean"] = sum(table.reward_sum for table in tables if table is not None) / judged
    yield from _total(shelf, Place(scope, "verify"), counts)


def _total(shelf: Shelf, place: Place, counts: Mapping[str, float]) -> Iterator[Finding]:
    metrics = shelf.manifests[place].metrics
    for name, value in counts.items():
        if name in metrics and abs(metrics[name] - value) > 1e-9 * max(1.0, abs(value)):
            what = f"its metric {name} is {metrics[name]:g}; its tables come to {value:g}"
            yield Finding(_key(shelf, place), what, "The manifest was edited. Put it back from a copy")


def _samples(shelf: Shelf, scope: Scope, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    """Of rollouts of the iteration, in their order; a rollout may give several."""
    update, generate = (shelf.manifests.get(Place(scope, stage)) for stage in ("update", "generate"))
    if update is None or generate is None:
        return
    rollouts = [item.ids for ref in _tables(generate) if (item := _sound(seen, ref)) and item.ids is not None]
    if len(rollouts) != len(_tables(generate)):
        return
    order = {str(name): number for number, name in enumerate(name for ids in rollouts for name in ids.to_pylist())}
    last = -1
    for ref in _tables(update):
        item = _sound(seen, ref)
        for name in item.ids.to_pylist() if item is not None and item.ids is not None else ():
            number = order.get(name)
            if number is None or number < last:
                how = "is of no rollout of this iteration" if number is None else "is out of order"
                yield Finding(ref.key, f"its sample {name} {how}", _REMEDY)
                return
            last = number


def _tables(manifest: Manifest) -> list[ObjectRef]:
    return [ref for ref in manifest.objects if ref.num_rows >= 0]


def _sound(seen: Mapping[str, Seen], ref: ObjectRef) -> Seen | None:
    """Of an object that is as its manifest says; others were reported already."""
    found = seen.get(ref.key)
    return found if found is not None and found.digest == ref.digest and not found.problem else None


def _other_source(key: str, name: str, found: object, expected: str) -> Finding:
    what = f"it was made from another {name} than the one there (digest {str(found)[:12]}, not {expected[:12]})"
    return Finding(key, what, _REMEDY)


def _key(shelf: Shelf, place: Place) -> str:
    if place.scope == START:
        return layout.start_manifest(shelf.run, place.stage)
    return layout.manifest(shelf.run, place.scope, place.stage)
