"""When what was computed, from telemetry: for timelines, and for the time that a run took."""

import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from posttrain_core import layout
from posttrain_core.inspect.catalogue import Run
from posttrain_core.layout import Scope
from posttrain_core.records import Purpose

_FIELDS = {"stage", "shard", "host", "process", "started", "ended"}
_ITERATION = re.compile(r"iteration=(\d+)/")


@dataclass(frozen=True)
class Interval:
    """One computation of one process; times in seconds since the epoch. `facts` are the stage's own counters."""

    iteration: int
    purpose: str
    stage: str
    shard: int
    host: str
    process: str  # names one process of one start of the run
    started: float
    ended: float
    facts: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True)
class Timing:
    """`total`: seconds from the first computation of a process to its last, over all processes that worked on the run.
    `stages`: seconds in which at least one computation of the stage was going on; stages may overlap."""

    total: float
    stages: dict[str, float]
    num_processes: int


def intervals(run: Run, iterations: range | None = None) -> list[Interval]:
    """Every computation that left telemetry, by its start: all, or those of some iterations (one after the other) and
    of the evaluations with their numbers. A record that was lost with its machine is missing."""
    keys = [key for purpose in Purpose for key in _keys(run, purpose, iterations)]
    with ThreadPoolExecutor() as pool:
        found = [
            _interval(key, _purpose(run.name, key), record)
            for key, data in zip(keys, pool.map(run.store.get, keys), strict=True)
            if (record := _record(data))
        ]
    return sorted(found, key=lambda interval: (interval.started, interval.ended))


def timing(found: Iterable[Interval]) -> Timing:
    found = list(found)
    processes: dict[str, list[Interval]] = {}
    stages: dict[str, list[Interval]] = {}
    for interval in found:
        processes.setdefault(interval.process, []).append(interval)
        stages.setdefault(interval.stage, []).append(interval)
    spans = [max(i.ended for i in part) - min(i.started for i in part) for part in processes.values()]
    return Timing(sum(spans), {stage: covered(part) for stage, part in stages.items()}, len(processes))


def covered(found: Iterable[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for interval in sorted(found, key=lambda interval: interval.started):
        total += max(0.0, interval.ended - max(interval.started, reached))
        reached = max(reached, interval.ended)
    return total


def _keys(run: Run, purpose: Purpose, iterations: range | None) -> Iterator[str]:
    folder = _folder(run.name, purpose)
    first = f"{folder}iteration={iterations.start:05d}/" if iterations is not None else ""
    for info in run.store.list(folder, first):
        match = _ITERATION.search(info.key)
        if iterations is not None and match is not None and int(match[1]) >= iterations.stop:
            return
        yield info.key


def _record(data: bytes) -> dict[str, Any] | None:
    """Telemetry is written without fsync: after a power cut it may be anything, and no run depends on it."""
    try:
        record = json.loads(data)
        return record if isinstance(record, dict) and record.keys() >= _FIELDS else None
    except ValueError:
        return None


def _interval(key: str, purpose: Purpose, record: dict[str, Any]) -> Interval:
    match = _ITERATION.search(key)
    assert match is not None, key
    known = {name: record.pop(name) for name in _FIELDS}
    return Interval(iteration=int(match[1]), purpose=str(purpose), facts=record, **known)


def _folder(run: str, purpose: Purpose) -> str:
    return layout.telemetry(run, Scope(0, purpose), "", 0, "").partition("iteration=")[0]


def _purpose(run: str, key: str) -> Purpose:
    return next(purpose for purpose in Purpose if key.startswith(_folder(run, purpose)))
