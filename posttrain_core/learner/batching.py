"""From samples to optimizer steps, ranks and padded micro-batches: pure functions, the same on every rank.

A *row* is one line of a padded forward pass: a prompt followed by the responses of all samples that share it (each
response sees the prompt and itself only, see `collate`), so that a group's prompt is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from posttrain_core.learner.presets import Normalizer
from posttrain_core.learner.samples import SampleArrays

# What a micro-batch costs beside its tokens, in tokens: keeps the packing from making many tiny ones.
MICRO_BATCH_OVERHEAD = 64


@dataclass(frozen=True)
class Row:
    """Samples with the same prompt. `num_tokens` counts it once, and no sample's last token, which predicts nothing."""

    samples: tuple[int, ...]
    num_tokens: int


MicroBatch = tuple[Row, ...]


@dataclass(frozen=True)
class Step:
    """One optimizer step. Every rank has the same number of micro-batches; one without rows only keeps step."""

    samples: tuple[int, ...]
    ranks: tuple[tuple[MicroBatch, ...], ...]


def plan_steps(
    samples: SampleArrays,
    num_steps: int,
    epochs: int,
    num_ranks: int,
    tokens_per_micro_batch: int,
    longest_shared_row: int,
    seed: int,
) -> list[Step]:
    """All steps of an iteration: `num_steps` for each of the `epochs` (fewer where there are fewer samples)."""
    random = np.random.default_rng(seed)
    chunks = [chunk for _ in range(epochs) for chunk in split_samples(samples.group, num_steps, random)]
    longest = min(tokens_per_micro_batch, longest_shared_row)
    return [_step(samples, chunk, num_ranks, tokens_per_micro_batch, longest) for chunk in chunks]


def split_samples(group: NDArray[np.int64], num_steps: int, random: np.random.Generator) -> list[tuple[int, ...]]:
    """Sample numbers for each step, groups in random order and kept together unless there are fewer than steps."""
    members = [np.flatnonzero(group == number) for number in random.permutation(np.unique(group))]
    if len(members) >= num_steps:
        bounds = np.linspace(0, len(members), num_steps + 1).astype(int)
        chunks = [np.concatenate(members[low:high]) for low, high in pairwise(bounds)]
    else:
        chunks = np.array_split(np.concatenate(members), num_steps)
    return [tuple(int(number) for number in chunk) for chunk in chunks if len(chunk)]


def share_prompts(samples: SampleArrays, chosen: Sequence[int], longest: int) -> list[Row]:
    """Rows of the chosen samples; those with one prompt share a row of at most `longest` tokens (0: none shares)."""
    by_prompt: dict[bytes, list[int]] = {}
    for sample in chosen:
        by_prompt.setdefault(samples.prompt(sample), []).append(sample)
    return [row for members in by_prompt.values() for row in _rows(samples, members, longest)]


def balance(rows: Sequence[Row], num_ranks: int) -> list[list[Row]]:
    """Rows for each rank, about the same number of tokens on each: the longest first, to whoever has least."""
    ranks: list[list[Row]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for row in sorted(rows, key=lambda row: (-row.num_tokens, row.samples)):
        rank = loads.index(min(loads))
        ranks[rank].append(row)
        loads[rank] += row.num_tokens
    return ranks


def pack(rows: Sequence[Row], budget: int) -> list[MicroBatch]:
    """Micro-batches of rows of similar length, each with at most `budget` padded tokens (a longer row is alone).

    Of all ways to cut the rows, sorted by length, the one with the fewest padded tokens plus overhead.
    """
    ordered = sorted(rows, key=lambda row: (-row.num_tokens, row.samples))
    best: list[tuple[int, int]] = [(0, 0)]  # cost of the first `end` rows, and where their last micro-batch begins
    for end in range(1, len(ordered) + 1):
        candidates = []
        for begin in range(end - 1, -1, -1):
            padded = (end - begin) * ordered[begin].num_tokens
            if padded > budget and begin < end - 1:
                break
            candidates.append((best[begin][0] + padded + MICRO_BATCH_OVERHEAD, begin))
        best.append(min(candidates))
    cuts = [len(ordered)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return [tuple(ordered[begin:end]) for end, begin in pairwise(cuts)]


def padding_share(steps: Sequence[Step]) -> float:
    """Share of the computed tokens that are padding."""
    batches = [batch for step in steps for rank in step.ranks for batch in rank if batch]
    padded = sum(len(batch) * max(row.num_tokens for row in batch) for batch in batches)
    return 1.0 - sum(row.num_tokens for batch in batches for row in batch) / padded if padded else 0.0


def token_weights(normalizer: Normalizer, num_tokens: Sequence[int], constant: int) -> NDArray[np.float64]:
    """What each learned token of a sequence weighs in the loss of its whole optimizer step.

    `num_tokens` are the learned tokens of all S sequences of the step, over all micro-batches and ranks (so that the
    result does not depend on how the step is cut). sequence_mean: GRPO, GSPO. constant: Dr.GRPO. token_mean: DAPO,
    CISPO. sequence_sum: RLOO, REINFORCE.
    """
    lengths = np.asarray(num_tokens, dtype=np.float64)
    if normalizer == "sequence_mean":
        return 1.0 / (len(lengths) * lengths)
    scale = {"token_mean": lengths.sum(), "sequence_sum": len(lengths), "constant": len(lengths) * constant}
    return np.full(len(lengths), 1.0 / scale[normalizer])


def _step(samples: SampleArrays, chosen: tuple[int, ...], num_ranks: int, budget: int, longest: int) -> Step:
    rows = share_prompts(samples, chosen, longest)
    ranks = [pack(rank, budget) for rank in balance(rows, num_ranks)]
    most = max(len(batches) for batches in ranks)
    return Step(chosen, tuple(tuple(batches) + ((),) * (most - len(batches)) for batches in ranks))


def _rows(samples: SampleArrays, members: Sequence[int], longest: int) -> list[Row]:
    """Rows of samples that have one prompt, filled in order."""
    num_prompt_tokens = samples.num_prompt_tokens(members[0])
    rows: list[Row] = []
    for sample in members:
        span = samples.span(sample)
        added = span.stop - span.start - num_prompt_tokens - 1
        if rows and rows[-1].num_tokens + added <= longest:
            rows[-1] = Row((*rows[-1].samples, sample), rows[-1].num_tokens + added)
        else:
            rows.append(Row((sample,), num_prompt_tokens + added))
    return rows
