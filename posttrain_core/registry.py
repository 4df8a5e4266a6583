"""The registry: names that move between published policies, such as the alias "best" of the model "math".

One object per model, `<root>/registry/<model>.json`, replaced by `put_if_match`:

    {"aliases": {"best": {"run": "r", "version": 3, "digest": "..."}},
     "history": [{"alias": "best", "run": "r", "version": 3, "digest": "...", "since": "2026-01-31 12:00:00+0000",
                  "move": "<id of this move>"}]}

The history has every move, oldest first. What an alias points at is kept by retention and gc.
"""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from posttrain_core import layout
from posttrain_core.errors import ObjectNotFound, StoreError
from posttrain_core.manifest import find_manifest
from posttrain_core.schema import corrupt
from posttrain_core.store.protocol import ObjectStore

_ATTEMPTS = 100
_random = Random()


@dataclass(frozen=True)
class Target:
    """A published policy; `digest` is that of its publish manifest."""

    run: str
    version: int
    digest: str


@dataclass(frozen=True)
class Move:
    alias: str
    target: Target
    since: str


def history(store: ObjectStore, model: str) -> list[Move]:
    """Every move of the model's aliases, oldest first."""
    moves = _read(store, layout.registry(model))[0]["history"]
    return [Move(move["alias"], Target(move["run"], move["version"], move["digest"]), move["since"]) for move in moves]


def reached(store: ObjectStore) -> set[str]:
    """The keys that the aliases of all models need: the manifest of each policy and the objects that it names."""
    targets = {
        Target(**found)
        for info in list(store.list(layout.registries()))
        for found in _read(store, info.key)[0]["aliases"].values()
    }
    keys = set()
    for key in {layout.policy_manifest(target.run, target.version) for target in targets}:
        if manifest := find_manifest(store, key):
            keys |= {key, *(ref.key for ref in manifest.objects)}
    return keys


def set_alias(store: ObjectStore, model: str, alias: str, target: Target) -> None:
    """Point the alias at `target`, whatever others make of it meanwhile.

    Read, change and replace until it holds. A move that was applied although its answer was lost is not repeated.
    """
    key, move = layout.registry(model), uuid.uuid4().hex
    for attempt in range(_ATTEMPTS):
        record, etag = _read(store, key)
        if any(past["move"] == move for past in record["history"]):
            return
        past = {"alias": alias, **asdict(target), "since": time.strftime("%Y-%m-%d %H:%M:%S%z"), "move": move}
        changed = {
            "aliases": record["aliases"] | {alias: asdict(target)},
            "history": [*record["history"], past],
        }
        if store.put_if_match(key, json.dumps(changed, indent=1).encode(), etag) is not None:
            return
        time.sleep(_random.uniform(0.0, 0.01 * min(attempt + 1, 20)))
    raise StoreError(
        f"cannot move alias {alias!r}: {key} in {store.url} changed {_ATTEMPTS} times meanwhile; try again"
    )


def _read(store: ObjectStore, key: str) -> tuple[Mapping[str, Any], str | None]:
    """The record, and an etag that is not newer than it: a replacement meanwhile makes the write lose, not this one."""
    info = store.stat(key)
    try:
        data = store.get(key) if info else None
    except ObjectNotFound:
        data = None
    if info is None or data is None:
        return {"aliases": {}, "history": []}, None
    try:
        record = json.loads(data)
        _ = record["aliases"], record["history"]
    except (ValueError, KeyError, TypeError) as error:
        raise corrupt(key, f"it is not a registry record ({error})") from error
    return record, info.etag
