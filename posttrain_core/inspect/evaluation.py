"""Held-out pass rates with intervals, and the paired comparison of two policy versions. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

_Z = 1.959964  # two-sided 95 %
_NUM_RESAMPLES = 10_000
_BLOCK = 500  # resamples drawn at once


@dataclass(frozen=True)
class Passes:
    """Of one problem under one policy version: judged rollouts (scored or truncated), and those that passed."""

    version: int
    domain: str
    problem_id: str
    num_judged: int
    num_passed: int


@dataclass(frozen=True)
class Evaluation:
    """The pass rate of one version over a domain's held-out problems ("" is all domains).

    `low` and `high` are the 95 % Wilson interval over rollouts, which takes those of one problem as independent; for
    the difference of two versions use `Comparison`.
    """

    version: int
    domain: str
    num_problems: int
    num_rollouts: int
    pass_rate: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Two versions on the same held-out problems: means of the problems' pass rates, and the mean of the differences
    with its 95 % interval by paired bootstrap over problems."""

    domain: str
    before_version: int
    after_version: int
    num_problems: int
    before: float
    after: float
    difference: float
    low: float
    high: float


def wilson(num_passed: int, num: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson 1927); (0, 1) when nothing was seen."""
    if num == 0:
        return 0.0, 1.0
    rate, spread = num_passed / num, _Z * _Z / num
    middle = rate + spread / 2
    half = _Z * sqrt(rate * (1 - rate) / num + spread / (4 * num))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def paired_bootstrap(differences: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean, resampling the differences; always the same for the same ones."""
    values = np.asarray(differences, dtype=np.float64)
    random = np.random.default_rng(seed)
    means = [
        values[random.integers(0, len(values), (_BLOCK, len(values)))].mean(axis=1)
        for _ in range(_NUM_RESAMPLES // _BLOCK)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def evaluations(passes: Iterable[Passes]) -> list[Evaluation]:
    """By version: over all domains, then each domain when there are several."""
    passes = list(passes)
    found = []
    for version in sorted({row.version for row in passes}):
        rows = [row for row in passes if row.version == version]
        for domain in _domains(passes):
            found.append(_evaluation(version, domain, [row for row in rows if domain in ("", row.domain)]))
    return found


def compare(passes: Iterable[Passes], before: int, after: int) -> list[Comparison]:
    """Over all domains, then each domain when there are several; problems judged under both versions count."""
    passes = list(passes)
    rates = {
        version: {(row.domain, row.problem_id): row.num_passed / row.num_judged for row in passes if row.num_judged}
        for version, passes in ((before, _of(passes, before)), (after, _of(passes, after)))
    }
    found = []
    for domain in _domains(passes):
        shared = [key for key in sorted(rates[before]) if key in rates[after] and domain in ("", key[0])]
        if shared:
            found.append(_comparison(domain, before, after, shared, rates))
    return found


def _evaluation(version: int, domain: str, rows: list[Passes]) -> Evaluation:
    passed, judged = sum(row.num_passed for row in rows), sum(row.num_judged for row in rows)
    rate = passed / judged if judged else 0.0
    return Evaluation(version, domain, len(rows), judged, rate, *wilson(passed, judged))


def _comparison(
    domain: str,
    before: int,
    after: int,
    problems: list[tuple[str, str]],
    rates: Mapping[int, Mapping[tuple[str, str], float]],
) -> Comparison:
    first = [rates[before][problem] for problem in problems]
    last = [rates[after][problem] for problem in problems]
    differences = [new - old for old, new in zip(first, last, strict=True)]
    num = len(problems)
    means = (sum(first) / num, sum(last) / num, sum(differences) / num)
    return Comparison(domain, before, after, num, *means, *paired_bootstrap(differences))


def _of(passes: list[Passes], version: int) -> list[Passes]:
    return [row for row in passes if row.version == version]


def _domains(passes: list[Passes]) -> list[str]:
    names = sorted({row.domain for row in passes})
    return ["", *names] if len(names) > 1 else [""]
