"""fork: a run that begins where another one was, and shares all that came before by reference.

The new run gets copies of the parent's manifests of iterations before `at`, byte for byte: they go on naming the
parent's objects. Of weights it needs version 0, version `at` and one checkpoint; the others are retired in it from the
start, so that the parent may drop them. What it was made with before `at` is in its `run.json`.

Other settings hold from iteration `at` on, with three limits:
- what version 0 and the state of the learner are made of cannot change (`FIXED`);
- the learner's state at `at` is a checkpoint and updates that are replayed with the *new* settings, so where those
  shape an update (`REPLAYED`), the checkpoint must be the one of version `at` itself;
- problems are dealt as if the new settings had held from the start; that may repeat or leave out some.
"""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from posttrain_core import layout
from posttrain_core.config import RunConfig
from posttrain_core.errors import ConfigError, RunConflict
from posttrain_core.inspect.catalogue import Run
from posttrain_core.layout import Scope
from posttrain_core.lease import Lease
from posttrain_core.manifest import Manifest, ObjectRef, fingerprint, parse_manifest
from posttrain_core.records import Purpose
from posttrain_core.stages.context import new_record, semantic_settings
from posttrain_core.stages.retention import unavailable
from posttrain_core.store.protocol import ObjectStore

FIXED = ("seed", "model", "sft", "learner.type", "learner.lora")
REPLAYED = ("algorithm", "learner", "plan.max_new_tokens")
_JUDGED_BY = ("domains", "plan", "eval", "sampler", "sandbox")  # what an evaluation depends on, beside the policy
_NUM_WRITERS = 16


@dataclass(frozen=True)
class Forked:
    """`checkpoint` is the iteration of the one that the fork goes on from, None for version 0 with a new optimizer.
    `changed` are the semantic settings that differ from `at` on."""

    run: str
    parent: str
    at: int
    num_manifests: int
    num_objects: int
    num_bytes: int  # shared
    checkpoint: int | None
    changed: tuple[str, ...]


def fork(store: ObjectStore, parent_name: str, at: int, config: RunConfig) -> Forked:
    """Make run `config.run` from the first `at` iterations of another one. It exists once its `run.json` does.

    Raises ConfigError for settings that cannot change and for a version that cannot be forked at (naming those that
    can), RunConflict when the name is taken.
    """
    parent = Run(store, parent_name)
    changed = changed_settings(parent.config, config)
    if refused := [name for name in changed if _under(name, FIXED)]:
        raise ConfigError(
            f"a fork cannot change {', '.join(refused)}: version 0 and the learner's state, which it shares with "
            f"{parent_name!r}, are made of them. Leave them as they are, or start a new run"
        )
    exact = any(_under(name, REPLAYED) for name in changed)
    checkpoint = _checkpoint(parent, at, exact)
    with Lease(store, config.run) as lease:
        if store.stat(layout.run_record(config.run)) is not None:
            raise RunConflict(f"run {config.run!r} exists in {store.url}: choose another name (--as NAME)")
        shared = _shared_manifests(parent, at, with_last=not any(_under(name, _JUDGED_BY) for name in changed))
        found = {key: manifest for key, manifest, _ in shared}
        held = _held(parent, at, checkpoint)
        writes = {copied_key(key, parent_name, config.run): data for key, _, data in shared} | _tombstones(
            parent, at, checkpoint, config.run
        )
        _refuse_leftovers(store, config.run, writes)
        _leave_notes(store, config.run, parent_name, at, held)
        with ThreadPoolExecutor(_NUM_WRITERS) as pool:
            for _ in pool.map(store.put_if_absent, writes.keys(), writes.values()):
                pass
        origin = {"parent": parent_name, "at": at, "config": parent.record["config"]}
        record = new_record(config) | {"fork": origin | {"before": parent.record.get("fork")}}
        _check_still_there(parent, at, exact, checkpoint)
        lease.check()
        if not store.put_if_absent(layout.run_record(config.run), json.dumps(record, indent=1).encode()):
            raise RunConflict(f"run {config.run!r} was started in {store.url} by another process meanwhile")
    needed = {ref.key: ref for key, manifest in found.items() for ref in manifest.objects if not _is_weights(ref)}
    needed |= {ref.key: ref for ref in held}
    num_bytes = sum(ref.num_bytes for ref in needed.values())
    return Forked(config.run, parent_name, at, len(found), len(needed), num_bytes, checkpoint, changed)


def changed_settings(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """The paths of the semantic settings that differ."""
    old, new = (fingerprint({}, semantic_settings(config)) for config in (before, after))
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return tuple(name.removeprefix("config.") for name in names)


def possible_versions(parent: Run, exact: bool) -> list[int]:
    """The policy versions at which a run can be forked now; `exact`: with other settings of the learner."""
    gone = {kind: unavailable(parent.store, parent.name, kind) for kind in ("policies", "checkpoints")}
    versions = [version for version in parent.policy_versions if version not in gone["policies"]]
    if not exact:
        return versions
    checkpoints = {iteration for iteration in _checkpoints(parent) if iteration not in gone["checkpoints"]}
    return [version for version in versions if version == 0 or version - 1 in checkpoints]


def copied_key(key: str, parent: str, name: str) -> str:
    """The key of the copy of one of the parent's manifests."""
    return layout.run_prefix(name) + key.removeprefix(layout.run_prefix(parent))


def _checkpoint(parent: Run, at: int, exact: bool) -> int | None:
    """The newest checkpoint from which version `at` can be reached. ConfigError when it cannot be forked there."""
    possible = possible_versions(parent, exact)
    if at not in possible:
        raise ConfigError(
            f"run {parent.name!r} cannot be forked at {at}: {_reason(parent, at)}; "
            f"possible{' with these settings' if exact else ''}: {', '.join(map(str, possible)) or 'none'}"
        )
    gone = unavailable(parent.store, parent.name, "checkpoints")
    return max((i for i in _checkpoints(parent) if i < at and i not in gone), default=None)


def _reason(parent: Run, at: int) -> str:
    if at not in parent.policy_versions:
        return f"policy version {at} was not published"
    if at in unavailable(parent.store, parent.name, "policies"):
        return f"policy version {at} was retired (checkpoint.keep_last, keep_every)"
    return (
        f"with other settings of the learner it would have to begin at a checkpoint, and iteration {at - 1} "
        "left none (checkpoint.every) or it was retired"
    )


def _checkpoints(parent: Run) -> list[int]:
    updates = parent.manifests(parent.scopes(Purpose.TRAIN, "update"), "update")
    return [scope.iteration for scope, update in updates.items() if update.notes.get("checkpoint")]


def _shared_manifests(parent: Run, at: int, with_last: bool) -> list[tuple[str, Manifest, bytes]]:
    """Key, manifest and bytes: of the start, of every iteration before `at`, and of the complete evaluations of
    versions before `at` (`with_last`: up to it)."""
    keys = [layout.start_manifest(parent.name, stage) for stage in ("sft", "publish")]
    keys = [key for key in keys if parent.store.stat(key) is not None]
    for scope, stages in parent.committed.items():
        if scope.purpose is Purpose.TRAIN:
            shared = scope.iteration < at
        else:
            shared = scope.iteration < at + with_last and "verify" in stages
        keys += [layout.manifest(parent.name, scope, stage) for stage in stages if shared]
    with ThreadPoolExecutor(_NUM_WRITERS) as pool:
        data = list(pool.map(parent.store.get, keys))
    return [(key, parse_manifest(item, key), item) for key, item in zip(keys, data, strict=True)]


def _held(parent: Run, at: int, checkpoint: int | None) -> list[ObjectRef]:
    """The weights that the fork cannot do without."""
    refs = [ref for version in {0, at} for ref in _policy(parent, version).objects if _is_weights(ref)]
    if checkpoint is not None:
        scope = Scope(checkpoint)
        refs += parent.manifests([scope], "update")[scope].named("/checkpoints/")
    return refs


def _policy(parent: Run, version: int) -> Manifest:
    if version == 0:
        key = layout.start_manifest(parent.name, "publish")
        return parse_manifest(parent.store.get(key), key)
    scope = Scope(version - 1)
    return parent.manifests([scope], "publish")[scope]


def _is_weights(ref: ObjectRef) -> bool:
    return "/policies/" in ref.key or "/checkpoints/" in ref.key


def _tombstones(parent: Run, at: int, checkpoint: int | None, name: str) -> dict[str, bytes]:
    """The fork does without every other version and checkpoint."""
    gone = [("policies", version) for version in range(1, at)]
    gone += [("checkpoints", iteration) for iteration in _checkpoints(parent) if iteration < at]
    return {
        layout.retired(name, kind, number): json.dumps({"kind": kind, "number": number, "objects": []}).encode()
        for kind, number in gone
        if (kind, number) != ("checkpoints", checkpoint)
    }


def _refuse_leftovers(store: ObjectStore, name: str, writes: Mapping[str, bytes]) -> None:
    """What this very fork wrote before it was killed is fine; anything else would be taken for the new run's."""
    strangers = [
        info.key
        for info in store.list(layout.run_prefix(name))
        if info.key != layout.lease(name) and (info.key not in writes or store.get(info.key) != writes[info.key])
    ]
    if strangers:
        raise RunConflict(
            f"{layout.run_prefix(name)} in {store.url} holds {len(strangers)} objects of another run, such as "
            f"{strangers[0]}: choose another name (--as NAME), or remove them (`posttrain delete`, `posttrain gc`)"
        )


def _leave_notes(store: ObjectStore, name: str, parent: str, at: int, held: Iterable[ObjectRef]) -> None:
    """With every run that the objects lie in: its retention leaves them alone from here on."""
    keys = [ref.key for ref in held]
    note: dict[str, Any] = {"fork": name, "parent": parent, "at": at, "objects": keys}
    data = json.dumps(note, indent=1).encode()
    for owner in sorted({parent, *(layout.run_of(key) for key in keys)}):
        key = layout.fork_note(owner, name)
        before = store.stat(key)
        if store.put_if_match(key, data, before.etag if before else None) is None:
            raise RunConflict(f"{key} is being written by another process: is run {name!r} being forked twice?")


def _check_still_there(parent: Run, at: int, exact: bool, checkpoint: int | None) -> None:
    """After the notes: whoever retired the objects or deleted the run before it could see them is seen here."""
    now = Run(parent.store, parent.name)
    _ = now.record
    if at not in possible_versions(now, exact) or checkpoint != _checkpoint(now, at, exact):
        raise RunConflict(
            f"run {parent.name!r} retired what a fork at {at} needs while it was being made; possible now: "
            f"{', '.join(map(str, possible_versions(now, exact))) or 'none'}"
        )


def _under(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)
