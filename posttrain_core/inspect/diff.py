"""Two policies on the same held-out problems: of two runs, or two versions of one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from posttrain_core.errors import ConfigError
from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.evaluation import paired_bootstrap
from posttrain_core.records import PASS_REWARD, Outcome, Purpose

_JUDGED = [str(Outcome.SCORED), str(Outcome.TRUNCATED)]


@dataclass(frozen=True)
class Attempts:
    """Of one policy at one problem: judged rollouts (scored or truncated)."""

    num_rollouts: int
    pass_rate: float
    reward: float  # mean


@dataclass(frozen=True)
class Pair:
    """One problem under both policies."""

    domain: str
    problem_id: str
    a: Attempts
    b: Attempts

    @property
    def gain(self) -> float:
        """In mean reward, from a to b."""
        return self.b.reward - self.a.reward


@dataclass(frozen=True)
class Difference:
    """Means over problems, and the mean of the problems' differences (b - a) with its 95 % interval by paired bootstrap
    over problems. `measure` is pass_rate or reward; `domain` "" is all of them."""

    domain: str
    measure: str
    num_problems: int
    a: float
    b: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Diff:
    """`pairs` by gain, the biggest loss first; `num_only_a` and `num_only_b` problems were judged in one run alone."""

    run_a: str
    run_b: str
    version_a: int
    version_b: int
    differences: list[Difference]
    pairs: list[Pair]
    num_only_a: int
    num_only_b: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def losses(self) -> list[Pair]:
        """The biggest first."""
        return [pair for pair in self.pairs if pair.gain < 0]

    @property
    def gains(self) -> list[Pair]:
        """The biggest first."""
        return [pair for pair in reversed(self.pairs) if pair.gain > 0]


def diff(a: Run, b: Run, version_a: int | None = None, version_b: int | None = None) -> Diff:
    """Compare evaluations. Without versions: the last one that both runs have, or the last of each where they have none
    in common. ConfigError when there is nothing to compare."""
    version_a, version_b = _versions(a, b, version_a, version_b)
    attempts_a, attempts_b = _attempts(a, version_a), _attempts(b, version_b)
    shared = sorted(attempts_a.keys() & attempts_b.keys())
    if not shared:
        raise ConfigError(
            f"version {version_a} of run {a.name!r} and version {version_b} of run {b.name!r} were evaluated on "
            "different problems: they have none in common"
        )
    pairs = [Pair(*key, attempts_a[key], attempts_b[key]) for key in shared]
    pairs.sort(key=lambda pair: (pair.gain, pair.domain, pair.problem_id))
    only_a, only_b = len(attempts_a) - len(shared), len(attempts_b) - len(shared)
    return Diff(a.name, b.name, version_a, version_b, _differences(pairs), pairs, only_a, only_b)


def difference_line(row: Difference) -> str:
    """One sentence, as "reward 0.31 -> 0.58: +0.27 [+0.15, +0.39] at 95 %, paired over 80 problems"."""
    where = f" ({row.domain})" if row.domain else ""
    return (
        f"{row.measure.replace('_', ' ')}{where} {row.a:.3f} -> {row.b:.3f}: {row.difference:+.3f} "
        f"[{row.low:+.3f}, {row.high:+.3f}] at 95 %, paired over {row.num_problems} problems"
    )


def _versions(a: Run, b: Run, version_a: int | None, version_b: int | None) -> tuple[int, int]:
    for run, version in ((a, version_a), (b, version_b)):
        if not run.evaluations:
            raise ConfigError(f"run {run.name!r} has no complete evaluation yet")
        if version is not None and version not in run.evaluations:
            known = ", ".join(map(str, run.evaluations))
            raise ConfigError(f"run {run.name!r} has no evaluation of version {version}; evaluated are {known}")
    common = sorted(set(a.evaluations) & set(b.evaluations))
    if version_a is None and version_b is None and common:
        return common[-1], common[-1]
    return (
        a.evaluations[-1] if version_a is None else version_a,
        b.evaluations[-1] if version_b is None else version_b,
    )


def _attempts(run: Run, version: int) -> dict[tuple[str, str], Attempts]:
    """By domain and problem."""
    columns = ("domain", "problem_id", "outcome", "reward")
    rows = run.rollouts(*columns, purpose=Purpose.EVAL, iteration=version, outcome=_JUDGED).to_table()
    passed = pc.cast(pc.greater_equal(rows["reward"], PASS_REWARD), pa.float64())
    groups = rows.append_column("passed", passed).group_by(["domain", "problem_id"])
    found = groups.aggregate([("reward", "count"), ("passed", "mean"), ("reward", "mean")]).to_pydict()
    values = zip(found["reward_count"], found["passed_mean"], found["reward_mean"], strict=True)
    keys = zip(found["domain"], found["problem_id"], strict=True)
    return {key: Attempts(*value) for key, value in zip(keys, values, strict=True)}


def _differences(pairs: Sequence[Pair]) -> list[Difference]:
    """Over all domains, then of each when there are several."""
    names = sorted({pair.domain for pair in pairs})
    return [
        _difference(domain, measure, [pair for pair in pairs if domain in ("", pair.domain)])
        for domain in ["", *(names if len(names) > 1 else [])]
        for measure in ("pass_rate", "reward")
    ]


def _difference(domain: str, measure: str, pairs: Sequence[Pair]) -> Difference:
    a = [float(getattr(pair.a, measure)) for pair in pairs]
    b = [float(getattr(pair.b, measure)) for pair in pairs]
    differences = [after - before for before, after in zip(a, b, strict=True)]
    num = len(pairs)
    means = (sum(a) / num, sum(b) / num, sum(differences) / num)
    return Difference(domain, measure, num, *means, *paired_bootstrap(differences))
