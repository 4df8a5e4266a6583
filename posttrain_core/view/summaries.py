"""What the charts of a run draw, by query: rows of rollouts are summed up where they are read, never gathered."""

import threading
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.query import sql
from posttrain_core.inspect.timeline import Interval, covered
from posttrain_core.records import PASS_REWARD, Outcome, Purpose

PROBLEMS = 60  # rows of the heat map at once
_Z = 1.959964  # two-sided 95 %
_JUDGED = f"outcome in ('{Outcome.SCORED}', '{Outcome.TRUNCATED}')"

# Groups are independent, the rollouts of one are not: their means are what the interval is about.
_REWARDS = f"""
select iteration, domain, count(*) as num, avg(mean) as mean, stddev_samp(mean) as deviation from (
    select iteration, domain, group_id, avg(reward) as mean from rollouts
    where purpose = '{Purpose.TRAIN}' and iteration >= ? and {_JUDGED} group by all
) group by all order by all
"""
_PROBLEMS = f"""
select problem_id, avg((reward >= {PASS_REWARD})::int) as rate, count(distinct iteration) as seen from rollouts
where purpose = ? and {_JUDGED} group by 1
order by seen desc, rate, problem_id limit {PROBLEMS + 1} offset ?
"""
_CELLS = f"""
select problem_id, iteration, avg((reward >= {PASS_REWARD})::int) as rate, count(*) as num from rollouts
where purpose = ? and problem_id in (select unnest(?::varchar[])) and {_JUDGED} group by 1, 2
"""


@dataclass(frozen=True)
class MeanReward:
    """Of a domain's groups in one iteration, with the 95 % interval over groups (None for a single group)."""

    iteration: int
    domain: str
    num_groups: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PassRates:
    """`cells[row][column]`: (pass rate, judged rollouts) of a problem in an iteration, None where it was not tried.
    Those seen most often come first, of these the hardest. `more` says whether there are problems after these."""

    problems: list[str]
    iterations: list[int]
    cells: list[list[tuple[float, int] | None]]
    more: bool


class Rewards:
    """The reward curves of runs. An iteration that is verified does not change, so each is summed up once."""

    def __init__(self) -> None:
        self._known: dict[str, list[MeanReward]] = {}
        self._lock = threading.Lock()

    def of(self, run: Run) -> list[MeanReward]:
        verified = [scope.iteration for scope in run.scopes(Purpose.TRAIN, "verify")]
        with self._lock:
            known = [row for row in self._known.get(run.name, []) if row.iteration in set(verified)]
            last = max((row.iteration for row in known), default=-1)
            if any(iteration > last for iteration in verified):
                known = known + [row for row in _mean_rewards(run, last + 1) if row.iteration in set(verified)]
                self._known[run.name] = known
            return known


def _mean_rewards(run: Run, first: int) -> list[MeanReward]:
    found = []
    for row in sql(run, _REWARDS, [first]).to_pylist():
        half = _Z * row["deviation"] / sqrt(row["num"]) if row["deviation"] is not None else None
        low, high = (None, None) if half is None else (row["mean"] - half, row["mean"] + half)
        found.append(MeanReward(row["iteration"], row["domain"], row["num"], row["mean"], low, high))
    return found


def pass_rates(run: Run, purpose: Purpose, start: int) -> PassRates:
    problems = [row["problem_id"] for row in sql(run, _PROBLEMS, [str(purpose), start]).to_pylist()]
    shown = problems[:PROBLEMS]
    found: dict[tuple[str, int], tuple[float, int]] = {}
    if shown:
        for row in sql(run, _CELLS, [str(purpose), shown]).to_pylist():
            found[row["problem_id"], row["iteration"]] = (row["rate"], row["num"])
    iterations = sorted({iteration for _, iteration in found})
    cells = [[found.get((problem, iteration)) for iteration in iterations] for problem in shown]
    return PassRates(shown, iterations, cells, len(problems) > PROBLEMS)


@dataclass(frozen=True)
class Bar:
    """On an axis from which the time between processes is cut out: seconds from the first computation."""

    start: float
    seconds: float
    interval: Interval | None  # None: nothing was computed


@dataclass(frozen=True)
class Schedule:
    """`idle`: a process ran and nothing was computed. `stops`: (place on the axis, seconds that are cut out there)."""

    bars: list[Bar]
    idle: list[Bar]
    stops: list[tuple[float, float]]

    def shares(self) -> dict[str, float]:
        """Seconds in which each stage was computed, and the idle ones. Stages may overlap."""
        stages: dict[str, list[Interval]] = {}
        for bar in self.bars:
            if bar.interval is not None:
                stages.setdefault(bar.interval.stage, []).append(bar.interval)
        return {stage: covered(part) for stage, part in stages.items()} | {
            "idle": sum(bar.seconds for bar in self.idle)
        }

    @property
    def seconds(self) -> float:
        return max((bar.start + bar.seconds for bar in [*self.bars, *self.idle]), default=0.0)


def schedule(found: list[Interval]) -> Schedule:
    """Computations, by their start, on one axis."""
    processes: dict[str, list[Interval]] = {}
    for interval in found:
        processes.setdefault(interval.process, []).append(interval)
    alive = _union([(min(i.started for i in part), max(i.ended for i in part)) for part in processes.values()])
    stops: list[tuple[float, float]] = []
    shifts: list[tuple[float, float]] = []  # from this moment on: what to take off
    taken = alive[0][0] if alive else 0.0
    for place, (start, _) in enumerate(alive):
        if place:
            gap = start - alive[place - 1][1]
            taken += gap
            stops.append((start - taken, gap))
        shifts.append((start, taken))

    def axis(moment: float) -> float:
        return moment - next(taken for start, taken in reversed(shifts) if start <= moment)

    busy = _union([(interval.started, interval.ended) for interval in found])
    idle = []
    for before, after in pairwise(busy):
        if axis(after[0]) > axis(before[1]):  # else it is a stop
            idle.append(Bar(axis(before[1]), axis(after[0]) - axis(before[1]), None))
    return Schedule([Bar(axis(each.started), each.seconds, each) for each in found], idle, stops)


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def metric_series(rows: list[dict[str, float]]) -> dict[str, list[tuple[int, float]]]:
    """By name: a metric's values by iteration, in the order of their names; those that never were are left out."""
    names = sorted({name for row in rows for name in row} - {"iteration"})
    series: dict[str, Any] = {
        name: [(int(row["iteration"]), row[name]) for row in rows if name in row] for name in names
    }
    return series
