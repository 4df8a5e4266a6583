"""How far a run is, who holds it, and what comes next."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

from posttrain_core import layout
from posttrain_core.errors import ObjectNotFound
from posttrain_core.inspect.catalogue import STAGES, Run
from posttrain_core.layout import Scope
from posttrain_core.records import Purpose


@dataclass(frozen=True)
class Holder:
    """Whoever took the run's lease last and did not give it back. `alive` is None where that cannot be told from
    here: on another host, or in a store without locks."""

    host: str
    pid: int
    since: str
    alive: bool | None


@dataclass(frozen=True)
class Status:
    """`num_iterations` is what the run was started for. `policy_version` is -1 before the start is done. `scope` and
    `stage` say what comes next (both "" when the run is complete), `done` what of that scope is committed."""

    run: str
    store: str
    created: str
    code_version: str
    num_iterations: int
    policy_version: int
    evaluated: list[int]
    scope: str
    stage: str
    done: list[str]
    metrics: dict[str, float]  # of the last verified iteration
    held_out_pass_rate: float | None  # of the last evaluated version
    holder: Holder | None

    @property
    def state(self) -> str:
        if self.holder is not None and self.holder.alive is not False:
            return "running" if self.holder.alive else "held"
        return "stopped" if self.stage else "complete"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"state": self.state}


def status(run: Run) -> Status:
    versions = run.policy_versions
    version = versions[-1] if versions else -1
    scope, stage = _next(run, version)
    evaluated = run.evaluations
    return Status(
        run=run.name,
        store=run.store.url,
        created=run.record["created"],
        code_version=run.record["code_version"],
        num_iterations=run.config.iterations,
        policy_version=version,
        evaluated=evaluated,
        scope=str(scope) if scope else "start" if stage else "",
        stage=stage,
        done=list(run.committed.get(scope, ())) if scope else [],
        metrics=_last_metrics(run),
        held_out_pass_rate=_pass_rate(run, evaluated[-1]) if evaluated else None,
        holder=_holder(run),
    )


def _next(run: Run, version: int) -> tuple[Scope | None, str]:
    """What the run will do next, in the order in which it does things; no scope before version 0 is published."""
    if version < 0:
        return None, "publish"
    on_schedule = version % run.config.eval.every == 0
    if on_schedule or version >= run.config.iterations:
        evaluation = Scope(version, Purpose.EVAL)
        if version not in run.evaluations:
            return evaluation, _first_missing(run, evaluation)
        goal = run.config.stop.eval_pass_rate
        if version >= run.config.iterations or (goal is not None and _pass_rate(run, version) >= goal):
            return None, ""
    return Scope(version), _first_missing(run, Scope(version))


def _first_missing(run: Run, scope: Scope) -> str:
    return next(stage for stage in STAGES if stage not in run.committed.get(scope, ()))


def _last_metrics(run: Run) -> dict[str, float]:
    verified = run.scopes(Purpose.TRAIN, "verify")[-1:]
    found: dict[str, float] = {}
    for scope in verified:
        found = {"iteration": scope.iteration}
        for stage in ("verify", "update"):
            if stage in run.committed[scope]:
                found |= run.manifests([scope], stage)[scope].metrics
    return found


def _pass_rate(run: Run, version: int) -> float:
    scope = Scope(version, Purpose.EVAL)
    return run.manifests([scope], "verify")[scope].metrics.get("pass_rate", 0.0)


def _holder(run: Run) -> Holder | None:
    try:
        record = json.loads(run.store.get(layout.lease(run.name)) or "{}")
        host, pid, since = record["host"], int(record["pid"]), record["since"]
    except (ObjectNotFound, ValueError, KeyError):
        return None
    here = host == socket.gethostname() and run.store.local_path(layout.lease(run.name)) is not None
    alive = _is_alive(pid) if here else None
    return None if alive is False else Holder(host, pid, since, alive)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
