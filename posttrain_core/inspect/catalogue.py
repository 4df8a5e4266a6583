"""The catalogue of a run: what its manifests say is there. Tables are never looked for by their names."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

from posttrain_core import layout
from posttrain_core.errors import ConfigError, ObjectCorrupt, ObjectNotFound, RunConflict
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, parse_manifest
from posttrain_core.records import Purpose
from posttrain_core.schema import corrupt
from posttrain_core.store import ObjectStore, open_store
from posttrain_core.store.counted import CountedStore

if TYPE_CHECKING:  # a look at a run should begin at once
    import pyarrow as pa
    from pyarrow.dataset import Expression

    from posttrain_core.config import RunConfig
    from posttrain_core.inspect.filters import Filter
    from posttrain_core.inspect.parquet import Footers
    from posttrain_core.inspect.rows import Rows

STAGES = ("plan", "generate", "execute", "verify", "update", "publish")
_MANIFEST = re.compile(r"iteration=(\d+)/(\w+)\.json$")
_NUM_READERS = 16  # objects fetched at once: what counts on S3 is the latency


class Run:
    """One run; it may still be going on. Reads only.

        run = Run("s3://bucket/prefix", "arithmetic")
        run.rollouts("rollout_id", "reward", domain="program", iteration=12).to_pandas()
        run.sql("select iteration, avg(reward) from rollouts group by 1 order by 1")

    Nothing is read before it is needed. What `committed` lists stays as it was when it was first asked for; rows and
    queries see what is committed by the time that they are read.
    """

    def __init__(self, store: ObjectStore | str, name: str = "") -> None:
        """`store` may be a folder or s3://bucket/prefix. No name: the newest run there, or ConfigError."""
        self.store = CountedStore(open_store(store) if isinstance(store, str) else store)
        self.name = name or _newest(self.store)
        self._manifests: dict[str, Manifest] = {}

    def renewed(self) -> Run:
        """The run as it is by now. What was read of it and cannot change is kept, and shared with this one."""
        _ = self.footers
        found = copy(self)
        for name in ("committed", "record", "config"):
            found.__dict__.pop(name, None)
        return found

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
        from posttrain_core.config import RunConfig

        return RunConfig.model_validate(self.record["config"])

    @cached_property
    def committed(self) -> dict[Scope, tuple[str, ...]]:
        """The stages whose manifest is there, by iteration or evaluation, in order."""
        found: dict[Scope, set[str]] = {}
        for purpose in Purpose:
            for info in self.store.list(_manifests_folder(self.name, purpose)):
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
        scopes = list(scopes)
        found = self._find_manifests(scopes, stage)
        if missing := [scope for scope in scopes if scope not in found]:
            raise ObjectNotFound(f"no object {layout.manifest(self.name, missing[0], stage)!r} in {self.store.url}")
        return found

    # --- rows ---

    def rollouts(self, *columns: str, where: Expression | None = None, **equal: Any) -> Rows:
        """One row per rollout with its verdict (reward, outcome, flags, breakdown, evidence) and `execution_status`.

        Lazily; `columns` in that order, or all. `equal` keeps rows in which a column has a value, or one of several
        (`iteration=[3, 4]`); `where` is any Arrow expression, as `pyarrow.dataset.field("reward") > 0.5`.
        """
        return self.rows("rollouts", *columns, where=where, **equal)

    def executions(self, *columns: str, where: Expression | None = None, **equal: Any) -> Rows:
        """What a sandbox observed of each rollout. Arguments as of `rollouts`."""
        return self.rows("executions", *columns, where=where, **equal)

    def verdicts(self, *columns: str, where: Expression | None = None, **equal: Any) -> Rows:
        """What the verifiers decided. Arguments as of `rollouts`."""
        return self.rows("verdicts", *columns, where=where, **equal)

    def samples(self, *columns: str, where: Expression | None = None, **equal: Any) -> Rows:
        """What was learned from, with advantages. Arguments as of `rollouts`."""
        return self.rows("samples", *columns, where=where, **equal)

    def plan(self, *columns: str, where: Expression | None = None, **equal: Any) -> Rows:
        """What was to be made of which problem. Arguments as of `rollouts`."""
        return self.rows("plan", *columns, where=where, **equal)

    def rows(self, view: str, *columns: str, where: Expression | None = None, **equal: Any) -> Rows:
        """Of any view of `inspect.tables.views`."""
        from posttrain_core.inspect.rows import Rows

        rows = Rows(self, view).where(where, **equal)
        return rows.select(*columns) if columns else rows

    def sql(self, query: str, *parameters: Any) -> pa.Table:
        """The answer to a query in DuckDB's SQL; the tables are described in `inspect.query`."""
        from posttrain_core.inspect.query import sql

        return sql(self, query, parameters)

    # --- what rows are read with ---

    @cached_property
    def footers(self) -> Footers:
        from posttrain_core.inspect.parquet import Footers

        return Footers()

    def committed_where(self, stages: Collection[str], rows: Filter) -> dict[str, dict[Scope, Manifest]]:
        """By stage: the manifests of the iterations and evaluations that a filter admits, in order. What it does not
        admit costs nothing: a few iterations are asked for by their keys; for more, the keys from the first one that is
        admitted to the last are listed."""
        found = [each for purpose in Purpose for each in self._admitted(stages, purpose, rows)]
        return {
            stage: self._find_manifests([scope for scope, committed in found if committed == stage], stage)
            for stage in stages
        }

    def _admitted(self, stages: Collection[str], purpose: Purpose, rows: Filter) -> Iterator[tuple[Scope, str]]:
        """Which of these stages may be committed where."""
        iterations = rows.iterations(purpose)
        if rows.spells_out(iterations):
            yield from ((Scope(iteration, purpose), stage) for iteration in iterations for stage in stages)
            return
        first = layout.manifest(self.name, Scope(iterations[0], purpose), "")
        admitted: dict[Scope, bool] = {}
        for info in self.store.list(_manifests_folder(self.name, purpose), first):
            match = _MANIFEST.search(info.key)
            if match is None or match[2] not in stages:
                continue
            scope = Scope(int(match[1]), purpose)
            if scope not in admitted:
                admitted[scope] = rows.admits_scope(scope)
                if not admitted[scope] and rows.ends_before(scope):
                    return
            if admitted[scope]:
                yield scope, match[2]

    def _find_manifests(self, scopes: list[Scope], stage: str) -> dict[Scope, Manifest]:
        """Those that are there. Each is read once."""
        keys = {scope: layout.manifest(self.name, scope, stage) for scope in scopes}
        missing = [key for key in keys.values() if key not in self._manifests]
        if missing:
            with ThreadPoolExecutor(_NUM_READERS) as pool:
                for key, data in zip(missing, pool.map(self._get, missing), strict=True):
                    if data is not None:
                        self._manifests[key] = parse_manifest(data, key)
        return {scope: self._manifests[key] for scope, key in keys.items() if key in self._manifests}

    def _get(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except ObjectNotFound:
            return None


def open_run(url: str, name: str = "") -> Run:
    """The run of that name in the store at `url`; the newest one when no name is given. ConfigError when none is."""
    run = Run(url, name)
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


def _newest(store: ObjectStore) -> str:
    runs = list_runs(store)
    if not runs:
        raise ConfigError(f"no runs in {store.url}; `posttrain run` starts one, --store names another store")
    return runs[-1].name


def _run_names(store: ObjectStore) -> list[str]:
    """A request for each run, however much it holds: from its first key to what comes after its last one."""
    names: list[str] = []
    while (first := next(store.list("runs/", f"runs/{names[-1]}0" if names else ""), None)) is not None:
        names.append(first.key.split("/")[1])  # "0" is the character after "/"
    return sorted(names)


def _manifests_folder(run: str, purpose: Purpose) -> str:
    return layout.manifest(run, Scope(0, purpose), "").partition("iteration=")[0]


def _no_run(store: ObjectStore, name: str) -> str:
    names = _run_names(store)
    nearest = get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; runs there: {', '.join(names[:8]) or 'none'}"
    return f"no run {name!r} in {store.url}{hint}"
