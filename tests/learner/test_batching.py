"""Steps, ranks, rows and micro-batches."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_core.errors import LearnerFault
from posttrain_core.learner import samples as sample_file
from posttrain_core.learner.batching import (
    Block,
    Row,
    balance,
    cut,
    pack,
    padding_share,
    plan_steps,
    share_prompts,
    token_weights,
)
from posttrain_core.learner.collate import collate
from posttrain_core.learner.samples import SampleArrays, from_demonstrations, from_records
from tests.learner.llama import make_samples


@pytest.fixture
def arrays() -> SampleArrays:
    return from_records(make_samples(num_groups=6, group_size=4))


def blocks_of(lengths: list[int]) -> list[Block]:
    return [Block((number,), length) for number, length in enumerate(lengths)]


def mix(
    num_groups: int, prompts: tuple[int, int], median: float, sigma: float, longest: int, seed: int
) -> SampleArrays:
    """Groups of 8: prompt lengths uniform over a range, response lengths lognormal and clipped."""
    random = np.random.default_rng(seed)
    all_prompts, responses = [], []
    for _ in range(num_groups):
        prompt = random.integers(3, 999, size=random.integers(*prompts)).tolist()
        for length in np.clip(median * np.exp(sigma * random.normal(size=8)), 2, longest).astype(int):
            all_prompts.append(prompt)
            responses.append([5] * int(length))
    arrays = from_demonstrations(all_prompts, responses)
    return replace(arrays, group=np.repeat(np.arange(num_groups), 8))


@settings(max_examples=40, deadline=None)
@given(
    num_steps=st.integers(1, 8),
    epochs=st.integers(1, 3),
    num_ranks=st.integers(1, 3),
    budget=st.integers(1, 200),
    seed=st.integers(0, 5),
)
def test_every_sample_is_learned_once_an_epoch(
    num_steps: int, epochs: int, num_ranks: int, budget: int, seed: int
) -> None:
    arrays = from_records(make_samples(num_groups=5, group_size=3))
    steps = plan_steps(arrays, num_steps, epochs, num_ranks, budget, 512, seed)
    assert len(steps) == num_steps * epochs
    for epoch in range(epochs):
        of_epoch = steps[epoch * num_steps : (epoch + 1) * num_steps]
        assert sorted(sample for step in of_epoch for sample in step.samples) == list(range(len(arrays)))
    for step in steps:
        computed = [sample for rank in step.ranks for batch in rank for row in batch for sample in row.samples]
        assert sorted(computed) == sorted(step.samples)
        assert len({len(rank) for rank in step.ranks}) == 1
    assert 0.0 <= padding_share(steps) < 1.0
    assert steps == plan_steps(arrays, num_steps, epochs, num_ranks, budget, 512, seed)


def test_groups_stay_together_while_there_are_enough(arrays: SampleArrays) -> None:
    for step in plan_steps(arrays, 3, 1, 1, 8192, 512, seed=1):
        groups = arrays.group[list(step.samples)]
        assert len(step.samples) == 8
        assert len(set(groups.tolist())) == 2


def test_epochs_are_shuffled_differently(arrays: SampleArrays) -> None:
    first, second = plan_steps(arrays, 1, 2, 1, 8192, 512, seed=1)
    assert first.samples != second.samples


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    ranks = balance(blocks_of([9, 8, 7, 6, 5, 4, 3, 2]), 2)
    assert [sum(block.num_tokens for block in rank) for rank in ranks] == [22, 22]


def test_rows_are_cut_by_similar_length_within_the_budget() -> None:
    batches = cut([Row((block,)) for block in blocks_of([200, 10, 190, 12, 11, 195])], budget=600)
    assert sorted([row.num_tokens for row in batch] for batch in batches) == [[12, 11, 10], [200, 195, 190]]
    for batch in pack(blocks_of(list(range(1, 60))), budget=100, longest=80):
        assert len(batch) == 1 or len(batch) * max(row.num_tokens for row in batch) <= 100


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 120), max_size=40), longest=st.integers(0, 100))
def test_packing_keeps_every_block_and_joins_within_the_limit(lengths: list[int], longest: int) -> None:
    blocks = blocks_of(lengths)
    rows = [row for batch in pack(blocks, budget=150, longest=longest) for row in batch]
    assert sorted(block.samples for row in rows for block in row.blocks) == [block.samples for block in blocks]
    assert all(row.num_tokens <= longest or len(row.blocks) == 1 for row in rows)


def test_short_blocks_are_joined_and_long_ones_are_not() -> None:
    (batch,) = pack(blocks_of([60, 50, 40, 30]), budget=8192, longest=512)
    assert sorted(row.num_tokens for row in batch) == [90, 90]
    assert all(len(row.blocks) == 1 for batch in pack(blocks_of([510] * 4), 8192, 512) for row in batch)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("budget", [4096, 8192])
@pytest.mark.parametrize(
    ("prompts", "median", "sigma", "longest"),
    [((50, 300), 200, 0.8, 1024), ((50, 300), 500, 0.6, 2048), ((30, 120), 100, 0.5, 512), ((20, 60), 20, 0.6, 64)],
    ids=["reasoning", "long", "medium", "short"],
)
def test_less_than_a_twentieth_is_padding(
    prompts: tuple[int, int], median: float, sigma: float, longest: int, budget: int, num_ranks: int
) -> None:
    for num_groups in (8, 64):
        arrays = mix(num_groups, prompts, median, sigma, longest, seed=num_groups)
        assert padding_share(plan_steps(arrays, 1, 1, num_ranks, budget, 512, seed=0)) < 0.05


def test_padding_share_counts_computed_tokens(arrays: SampleArrays) -> None:
    (step,) = plan_steps(arrays, 1, 1, 1, 8192, 0, seed=0)
    (only,) = {len(step.ranks)}
    assert only == 1
    computed = sum(len(batch) * max(row.num_tokens for row in batch) for batch in step.ranks[0])
    wanted = len(arrays.tokens) - len(arrays)  # a sample's last token predicts nothing
    assert padding_share([step]) == pytest.approx(1 - wanted / computed)


def test_samples_with_one_prompt_share_a_row_up_to_its_limit(arrays: SampleArrays) -> None:
    shared = share_prompts(arrays, range(len(arrays)), longest=512)
    assert len(shared) == 6
    assert sum(row.num_tokens for row in shared) < sum(
        row.num_tokens for row in share_prompts(arrays, range(len(arrays)), longest=0)
    )
    assert all(row.num_tokens <= 15 or len(row.samples) == 1 for row in share_prompts(arrays, range(24), longest=15))


def test_token_weights_add_up_to_the_normaliser() -> None:
    assert token_weights("sequence_mean", [2, 4], 0).tolist() == [1 / 4, 1 / 8]
    assert token_weights("sequence_sum", [2, 4], 0).tolist() == [1 / 2, 1 / 2]
    assert token_weights("token_mean", [2, 4], 0).tolist() == [1 / 6, 1 / 6]
    assert token_weights("constant", [2, 4], 10).tolist() == [1 / 20, 1 / 20]


def test_collate_lays_out_a_shared_row() -> None:
    samples = from_demonstrations([[7, 8], [7, 8]], [[1, 2, 3], [4, 5]])
    batch = collate(samples, [Row((Block((0, 1), 5),))], np.array([0.5, 0.25]))
    assert batch.input_ids.tolist() == [[7, 8, 1, 2, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.target.tolist() == [1, 2, 3, 4, 5]
    assert batch.column.tolist() == [1, 2, 3, 1, 4]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 1]
    assert batch.weight.tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert batch.visible is not None
    assert batch.visible[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_collate_lays_out_blocks_beside_one_another() -> None:
    samples = from_demonstrations([[7, 8], [7, 8], [6, 9], [6]], [[1, 2, 3], [4, 5], [2, 3], [1, 1]])
    rows = [Row((Block((0, 1), 5), Block((2,), 3))), Row((Block((3,), 2),))]
    batch = collate(samples, rows, np.ones(4))
    assert batch.input_ids.tolist() == [[7, 8, 1, 2, 4, 6, 9, 2], [6, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 2, 0, 1, 2]
    assert batch.target.tolist() == [1, 2, 3, 4, 5, 2, 3, 1, 1]
    assert batch.column.tolist() == [1, 2, 3, 1, 4, 6, 7, 0, 1]
    assert batch.row.tolist() == [0] * 7 + [1] * 2
    assert batch.visible is not None
    assert batch.visible[0, 5:].astype(int).tolist() == [
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]
    assert not batch.visible[1, :2, 2:].any()
    assert batch.visible.any(axis=2).all()  # padding too: attention over nothing has no value


def test_collate_skips_what_the_policy_did_not_emit() -> None:
    samples = from_demonstrations([[7]], [[1, 2, 3]])
    samples = replace(samples, loss_mask=np.array([0, 1, 0, 1]))
    batch = collate(samples, [Row((Block((0,), 3),))], np.ones(1))
    assert (batch.target.tolist(), batch.column.tolist(), batch.visible) == ([1, 3], [0, 2], None)


def test_samples_survive_the_file(arrays: SampleArrays, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("samples") / "samples.npz"
    sample_file.save(arrays, path)
    loaded = sample_file.load(path)
    assert loaded.tokens.tolist() == arrays.tokens.tolist()
    assert loaded.advantage.tolist() == arrays.advantage.tolist()
    assert [loaded.prompt(number) for number in range(len(loaded))] == [arrays.prompt(n) for n in range(len(arrays))]


def test_a_sample_without_anything_to_learn_from_is_named() -> None:
    sample = make_samples(1, 1)[0]
    with pytest.raises(LearnerFault, match=r"g0\.r0"):
        from_records([replace(sample, loss_mask=(0,) * len(sample.input_ids))])
