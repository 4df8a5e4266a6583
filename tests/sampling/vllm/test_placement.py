"""Which server gets which request: the rule, on servers that finish requests in any order."""

import random
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from posttrain_core.sampling import SampleRequest
from posttrain_core.sampling.vllm.placement import Job, Lane, Waiting, lightest


def jobs_of(group_sizes: list[int], max_new_tokens: int = 10) -> list[Job]:
    return [
        Job(SampleRequest((group,), member, max_new_tokens, 1.0), lambda answer: None)
        for group, size in enumerate(group_sizes)
        for member in range(size)
    ]


def place(waiting: Waiting, lanes: list[Lane]) -> list[tuple[Job, Lane]]:
    placed = []
    while (lane := lightest(lanes)) is not None and (job := waiting.take(lane)) is not None:
        lane.give(job)
        placed.append((job, lane))
    return placed


def filled(jobs: list[Job]) -> Waiting:
    waiting = Waiting()
    for job in jobs:
        waiting.put(job)
    return waiting


@given(
    group_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    capacities=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 99),
)
def test_no_server_has_room_while_requests_wait_and_each_is_placed_once(
    group_sizes: list[int], capacities: list[int], seed: int
) -> None:
    jobs, lanes = jobs_of(group_sizes), [Lane(capacity) for capacity in capacities]
    waiting, order, placed = filled(jobs), random.Random(seed), []
    while True:
        placed += [job for job, _ in place(waiting, lanes)]
        assert not waiting.all() or all(lane.room <= 0 for lane in lanes)
        assert all(len(lane.jobs) <= lane.capacity for lane in lanes)
        busy = [lane for lane in lanes if lane.jobs]
        if not busy:
            break
        lane = order.choice(busy)
        lane.drop(order.choice(sorted(lane.jobs, key=jobs.index)))
    assert sorted(map(jobs.index, placed)) == list(range(len(jobs)))
    assert all(lane.outstanding == 0 for lane in lanes)


@given(
    group_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    num_lanes=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_fewer_groups_are_split_than_there_are_servers(group_sizes: list[int], num_lanes: int, seed: int) -> None:
    jobs = jobs_of(group_sizes)
    random.Random(seed).shuffle(jobs)
    servers_of = defaultdict(set)
    for job, lane in place(filled(jobs), [Lane(1000) for _ in range(num_lanes)]):
        servers_of[job.request.prompt_ids].add(lane)
    assert sum(len(lanes) > 1 for lanes in servers_of.values()) < num_lanes


@given(num_rounds=st.integers(1, 5), num_lanes=st.integers(1, 5), size=st.integers(1, 9))
def test_equal_groups_that_divide_evenly_stay_whole(num_rounds: int, num_lanes: int, size: int) -> None:
    servers_of = defaultdict(set)
    lanes = [Lane(1000) for _ in range(num_lanes)]
    for job, lane in place(filled(jobs_of([size] * num_rounds * num_lanes)), lanes):
        servers_of[job.request.prompt_ids].add(lane)
    assert all(len(its) == 1 for its in servers_of.values())
    assert {len(lane.jobs) for lane in lanes} == {num_rounds * size}


def test_one_large_group_is_spread_evenly() -> None:
    lanes = [Lane(1000) for _ in range(3)]
    place(filled(jobs_of([30])), lanes)
    assert [len(lane.jobs) for lane in lanes] == [10, 10, 10]


def test_load_counts_tokens_that_are_still_to_come() -> None:
    lanes = [Lane(10), Lane(10)]
    long, short = jobs_of([1], max_new_tokens=100)[0], jobs_of([0, 1], max_new_tokens=60)[0]
    place(filled([long, short]), lanes)
    assert [lane.outstanding for lane in lanes] == [101, 61]
    lanes[0].advance(long, 1)
    assert lanes[0].outstanding == 99  # the prompt is computed by then
    lanes[0].advance(long, 50)
    assert lightest(lanes) is lanes[0]


def test_a_suspect_has_a_server_to_itself() -> None:
    suspect, *others = jobs_of([5])
    suspect.suspect = True
    lanes = [Lane(10), Lane(10)]
    lanes[0].give(others[0])
    waiting = filled([others[1], suspect])
    assert [(job, lane) for job, lane in place(waiting, lanes) if job is suspect] == [(suspect, lanes[1])]
    assert lanes[1].jobs == {suspect}
    assert lanes[1].room == 0


def test_requests_of_a_lost_server_and_of_a_caller_that_left() -> None:
    jobs = jobs_of([4])
    gone, other, waiting = Lane(1), Lane(0), filled(jobs)
    place(waiting, [gone, other])
    gone.capacity, other.capacity = 0, 2
    waiting.forget(gone)
    waiting.remove({jobs[3]})
    assert [job for job, _ in place(waiting, [gone, other])] == jobs[1:3]
    assert not waiting.all()
