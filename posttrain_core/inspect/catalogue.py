"""The catalogue of a run: what its manifests say is there. Tables are never looked for by their names."""

import json
import re
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from posttrain_core import layout
from posttrain_core.config import RunConfig
from posttrain_core.errors import ConfigError, ObjectCorrupt, ObjectNotFound, RunConflict
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, parse_manifest
from posttrain_core.records import Purpose
from posttrain_core.schema import corrupt
from posttrain_core.store import ObjectStore, open_store

STAGES = ("plan", "generate", "execute", "verify", "update", "publish")
_MANIFEST = re.compile(r"iteration=(\d+)/(\w+)\.json$")
_NUM_READERS = 16  # objects fetched at once: what counts on S3 is the latency


class Run:
    """One run as its store shows it when it is first asked; it may still be going on. Reads only."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store = store
        self.name = name
        self._manifests: dict[str, Manifest] = {}

    @cached_property
    def record(self) -> dict[str, Any]:
        """`run.json`: config, code_version, environment, created. ConfigError when there is no such run."""
        key = layout.run_record(self.name)
        try:
            found: dict[str, Any] = json.loads(self.store.get(key))
            name, _ = found["config"]["run"], found["created"]
        except ObjectNotFound:
            raise ConfigError(_no_run(self.store, self.name)) from None
        except (ValueError, KeyError, TypeError) as error:
            raise corrupt(key, f"it is not the record of a run ({error!r})") from error
        if name != self.name:
            raise RunConflict(f"{key} is the record of run {name!r}: the folder was renamed or copied; name it back")
        return found

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.record["config"])

    @cached_property
    def committed(self) -> dict[Scope, tuple[str, ...]]:
        """The stages whose manifest is there, by iteration or evaluation, in order."""
        found: dict[Scope, set[str]] = {}
        for purpose in Purpose:
            folder = layout.manifest(self.name, Scope(0, purpose), "plan").partition("iteration=")[0]
            for info in self.store.list(folder):
                if match := _MANIFEST.search(info.key):
                    found.setdefault(Scope(int(match[1]), purpose), set()).add(match[2])
        ordered = sorted(found, key=lambda scope: (scope.purpose, scope.iteration))
        return {scope: tuple(stage for stage in STAGES if stage in found[scope]) for scope in ordered}

    def scopes(self, purpose: Purpose, stage: str = "plan") -> list[Scope]:
        """The iterations (train) or evaluations (eval) that have come through a stage."""
        return [scope for scope, stages in self.committed.items() if scope.purpose is purpose and stage in stages]

    @property
    def iterations(self) -> list[int]:
        """The iterations that have begun."""
        return [scope.iteration for scope in self.scopes(Purpose.TRAIN)]

    @property
    def evaluations(self) -> list[int]:
        """The policy versions whose evaluation is complete."""
        return [scope.iteration for scope in self.scopes(Purpose.EVAL, "verify")]

    @property
    def policy_versions(self) -> list[int]:
        """The versions that were published; retention may have removed their weights since."""
        first = [] if self.store.stat(layout.start_manifest(self.name, "publish")) is None else [0]
        return first + [scope.iteration + 1 for scope in self.scopes(Purpose.TRAIN, "publish")]

    def manifests(self, scopes: Iterable[Scope], stage: str) -> dict[Scope, Manifest]:
        """The manifests of a stage that has been committed in each of the scopes. Each is read once."""
        keys = {scope: layout.manifest(self.name, scope, stage) for scope in scopes}
        missing = [key for key in keys.values() if key not in self._manifests]
        if missing:
            with ThreadPoolExecutor(_NUM_READERS) as pool:
                for key, data in zip(missing, pool.map(self.store.get, missing), strict=True):
                    self._manifests[key] = parse_manifest(data, key)
        return {scope: self._manifests[key] for scope, key in keys.items()}


def open_run(url: str, name: str = "") -> Run:
    """The run of that name in the store at `url`; the newest one when no name is given. ConfigError when none is."""
    store = open_store(url)
    if not name:
        runs = list_runs(store)
        if not runs:
            raise ConfigError(f"no runs in {store.url}; `posttrain run` starts one, --store names another store")
        return runs[-1]
    run = Run(store, name)
    _ = run.record
    return run


def list_runs(store: ObjectStore) -> list[Run]:
    """The runs in a store, the newest last."""
    runs = [Run(store, name) for name in _run_names(store) if store.stat(layout.run_record(name)) is not None]
    return sorted(filter(_readable, runs), key=lambda run: (run.record["created"], run.name))


def _readable(run: Run) -> bool:
    """One damaged record must not hide the other runs; who asks for that run by name is told."""
    try:
        return bool(run.record)
    except (ObjectCorrupt, RunConflict) as error:
        warnings.warn(f"left out: {error}", stacklevel=2)
        return False


def _run_names(store: ObjectStore) -> list[str]:
    folder = store.local_path("runs")
    if folder is not None:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    return sorted({info.key.split("/")[1] for info in store.list("runs/")})


def _no_run(store: ObjectStore, name: str) -> str:
    names = _run_names(store)
    nearest = get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; runs there: {', '.join(names[:8]) or 'none'}"
    return f"no run {name!r} in {store.url}{hint}"
