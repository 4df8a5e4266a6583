"""Intervals against known values and properties; the comparison against a hand-made one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain_core.inspect.evaluation import Passes, compare, evaluations, paired_bootstrap, wilson

PASSES = [
    Passes(0, "a", "a/1", 4, 0),
    Passes(0, "a", "a/2", 4, 2),
    Passes(0, "b", "b/1", 2, 1),
    Passes(0, "b", "b/2", 4, 4),  # not judged under version 9
    Passes(9, "a", "a/1", 4, 4),
    Passes(9, "a", "a/2", 4, 2),
    Passes(9, "b", "b/1", 4, 1),
    Passes(9, "b", "b/2", 0, 0),
]


@pytest.mark.parametrize(
    ("passed", "num", "low", "high"),
    [(5, 10, 0.2366, 0.7634), (0, 12, 0.0, 0.2425), (12, 12, 0.7575, 1.0), (81, 263, 0.2553, 0.3662), (0, 0, 0.0, 1.0)],
)
def test_wilson(passed: int, num: int, low: float, high: float) -> None:
    """81 of 263 is the example of Newcombe, Statistics in Medicine 17 (1998)."""
    assert wilson(passed, num) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda num: st.tuples(st.integers(0, num), st.just(num))))
def test_wilson_holds_the_rate(counts: tuple[int, int]) -> None:
    passed, num = counts
    low, high = wilson(passed, num)
    assert 0 <= low <= passed / num + 1e-12
    assert passed / num - 1e-12 <= high <= 1


def test_bootstrap_is_what_theory_says_for_a_large_sample() -> None:
    differences = [0.25 * ((7 * k) % 9 - 4) for k in range(450)]  # mean 0, every value equally often
    low, high = paired_bootstrap(differences)
    half = 1.96 * (sum(d * d for d in differences) / 450) ** 0.5 / 450**0.5
    assert (low, high) == pytest.approx((-half, half), abs=0.1 * half)
    shifted = paired_bootstrap([d + 3 for d in differences])
    assert shifted == pytest.approx((low + 3, high + 3))
    assert paired_bootstrap(differences) == (low, high)
    assert paired_bootstrap([0.5] * 6) == (0.5, 0.5)


def test_comparison_is_over_problems_judged_under_both() -> None:
    whole, first, second = compare(PASSES, 0, 9)
    assert (whole.domain, first.domain, second.domain) == ("", "a", "b")
    assert (whole.num_problems, first.num_problems, second.num_problems) == (3, 2, 1)
    assert (first.before, first.after, first.difference) == (0.25, 0.75, 0.5)
    assert (first.low, first.high) == (0.0, 1.0)
    assert (second.before, second.after, second.difference) == (0.5, 0.25, -0.25)
    assert whole.difference == pytest.approx((1.0 + 0.0 - 0.25) / 3)


def test_evaluations_count_rollouts() -> None:
    found = {(row.version, row.domain): row for row in evaluations(PASSES)}
    assert found[0, ""].pass_rate == 7 / 14
    assert found[9, "b"].pass_rate == 1 / 4
    assert found[9, "b"].num_problems == 2
    assert (found[0, "a"].low, found[0, "a"].high) == wilson(2, 8)


def test_one_domain_is_not_listed_twice() -> None:
    only = [row for row in PASSES if row.domain == "a"]
    assert [row.domain for row in evaluations(only)] == ["", ""]
    assert [row.domain for row in compare(only, 0, 9)] == [""]
