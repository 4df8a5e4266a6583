"""Plans: what is sampled depends on the run's seed, its settings and the iteration, and on nothing else."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_core.config import RunConfig
from posttrain_core.domains.mixture import exact_counts, training_counts
from posttrain_core.layout import Scope
from posttrain_core.lease import Lease
from posttrain_core.records import PlanRow, Purpose, Split
from posttrain_core.schema import parse_problem
from posttrain_core.stages.context import Run
from posttrain_core.stages.plan import plan_rows, split_shards
from posttrain_core.store.memory import MemoryStore

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


def run_with(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "run": "r",
        "domains": {"a": {"type": "program", "weight": 2.0}, "b": {"type": "program", "weight": 1.0}},
        "plan": {"problems_per_iteration": 12, "group_size": 3, "rollouts_per_shard": 10},
        "eval": {"num_problems": 9, "samples_per_problem": 2},
        "sampler": {"type": "scripted"},
        "learner": {"type": "numpy"},
    }
    config = RunConfig.model_validate(values | changes)
    store = MemoryStore()
    return Run(store, config, Lease(store, "r"), Path(tempfile.gettempdir()))


def rows_of(run: Run, iteration: int, purpose: Purpose = Purpose.TRAIN) -> list[PlanRow]:
    return list(plan_rows(run, Scope(iteration, purpose)))


# --- shares ---


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(0, 3000))
def test_training_counts_sum_to_the_total_and_follow_the_weights(weights: list[float], total: int) -> None:
    counts = training_counts(weights, total)
    assert sum(counts) == total
    assert len(counts) == len(weights)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) <= 6  # the sequence's discrepancy grows with log(total)


@settings(max_examples=80, deadline=None)
@given(WEIGHTS, st.integers(0, 500), st.integers(0, 40))
def test_no_training_count_ever_falls(weights: list[float], total: int, more: int) -> None:
    before, after = training_counts(weights, total), training_counts(weights, total + more)
    assert all(later >= earlier for earlier, later in zip(before, after, strict=True))


@settings(max_examples=80, deadline=None)
@given(WEIGHTS, st.integers(0, 2000), st.integers(1, 64))
def test_every_iteration_holds_about_its_share_of_every_domain(weights: list[float], start: int, size: int) -> None:
    before, after = training_counts(weights, start), training_counts(weights, start + size)
    for earlier, later, weight in zip(before, after, weights, strict=True):
        assert abs(later - earlier - size * weight / sum(weights)) <= 6


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(0, 3000))
def test_exact_counts_are_shares_rounded(weights: list[float], total: int) -> None:
    counts = exact_counts(weights, total)
    assert sum(counts) == total
    whole = sum(map(Fraction, weights))
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * Fraction(weight) / whole) <= 1 + Fraction(1, 10**6)


# --- shards ---


def rows_in_groups(sizes: Sequence[int]) -> list[PlanRow]:
    return [
        PlanRow(f"g{group}.{index}", f"g{group}", "p", "d", Purpose.TRAIN, index, 0, 0, 8, 1.0, (), "{}")
        for group, size in enumerate(sizes)
        for index in range(size)
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 30))
def test_shards_keep_groups_whole_and_order_and_size(sizes: list[int], size: int) -> None:
    rows = rows_in_groups(sizes)
    shards = split_shards(rows, size)
    assert [row for shard in shards for row in shard] == rows
    assert all(shards)
    homes: dict[str, set[int]] = {}
    for number, shard in enumerate(shards):
        for row in shard:
            homes.setdefault(row.group_id, set()).add(number)
        assert len(shard) <= size or len({row.group_id for row in shard}) == 1
    assert all(len(numbers) == 1 for numbers in homes.values())
    for left, right in pairwise(shards):
        first = sum(row.group_id == right[0].group_id for row in right)
        assert len(left) + first > size, "no shard is closed before it is full"


# --- rows ---


def test_a_plan_is_the_same_twice_and_another_one_for_another_seed() -> None:
    for purpose in (Purpose.TRAIN, Purpose.EVAL):
        rows = rows_of(run_with(), 3, purpose)
        assert rows_of(run_with(), 3, purpose) == rows
        assert rows_of(run_with(run="another", iterations=7), 3, purpose) == rows
        other = rows_of(run_with(seed=1), 3, purpose)
        assert not {row.seed for row in rows} & {row.seed for row in other}
        assert [row.problem_id for row in rows] != [row.problem_id for row in other]


def test_rows_are_complete_groups_with_seeds_of_their_own() -> None:
    run = run_with()
    rows = [row for iteration in range(5) for row in rows_of(run, iteration)]
    rows += rows_of(run, 0, Purpose.EVAL)
    assert len({row.rollout_id for row in rows}) == len(rows) == 5 * 12 * 3 + 9 * 2
    assert len({row.seed for row in rows}) == len(rows)
    assert all(0 <= row.seed < 2**63 for row in rows)
    for group, size in Counter(row.group_id for row in rows).items():
        members = [row for row in rows if row.group_id == group]
        assert [row.sample_index for row in members] == list(range(size))
        assert size == (2 if members[0].purpose is Purpose.EVAL else 3)
        assert len({(row.problem, row.problem_id, row.domain) for row in members}) == 1
        problem = parse_problem(members[0].problem)
        assert problem.id == members[0].problem_id
        assert problem.split is (Split.HELD_OUT if members[0].purpose is Purpose.EVAL else Split.TRAIN)


def test_settings_arrive_in_the_rows() -> None:
    run = run_with(
        plan={"problems_per_iteration": 2, "group_size": 1, "max_new_tokens": 7, "temperature": 0.5},
        eval={"num_problems": 2, "samples_per_problem": 1, "temperature": 0.0},
    )
    for iteration in (0, 4):
        assert {(row.policy_version, row.max_new_tokens, row.temperature) for row in rows_of(run, iteration)} == {
            (iteration, 7, 0.5)
        }
        evaluated = rows_of(run, iteration, Purpose.EVAL)
        assert {(row.policy_version, row.max_new_tokens, row.temperature) for row in evaluated} == {(iteration, 7, 0.0)}


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 3.0)])
def test_every_problem_comes_once_in_each_pass(weights: tuple[float, ...]) -> None:
    run = run_with(
        domains={f"d{number}": {"type": "program", "weight": weight} for number, weight in enumerate(weights)},
        plan={"problems_per_iteration": 64, "group_size": 1},
    )
    sizes = {name: domain.num_problems(Split.TRAIN) for name, domain in run.domains.items()}
    seen: dict[str, list[str]] = {name: [] for name in sizes}
    iteration = 0
    while any(len(seen[name]) < 2 * size for name, size in sizes.items()):
        for row in rows_of(run, iteration):
            seen[row.domain].append(row.problem_id)
        iteration += 1
    for name, size in sizes.items():
        first, second = seen[name][:size], seen[name][size : 2 * size]
        assert len(set(first)) == len(set(second)) == size
        assert first != second, "each pass in an order of its own"


def test_evaluations_of_all_versions_ask_the_same_with_the_same_seeds() -> None:
    run = run_with()
    asked = [
        [(row.problem_id, row.sample_index, row.seed, row.problem) for row in rows_of(run, version, Purpose.EVAL)]
        for version in (0, 1, 40)
    ]
    assert asked[0] == asked[1] == asked[2]
    trained = {row.problem_id for iteration in range(60) for row in rows_of(run, iteration)}
    assert not trained & {problem_id for problem_id, *_ in asked[0]}


def test_more_iterations_change_no_earlier_plan() -> None:
    assert rows_of(run_with(iterations=2), 1) == rows_of(run_with(iterations=200), 1)
