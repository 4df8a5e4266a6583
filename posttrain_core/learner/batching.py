"""From samples to optimizer steps, ranks and padded micro-batches: pure functions, the same on every rank.

A *block* is a prompt followed by the responses of samples that share it, so that a group's prompt is computed once. A
*row* is one line of a padded forward pass: one block, or several short ones. A token sees its block's prompt and its
own response only (see `collate`).
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from posttrain_core.learner.presets import Normalizer
from posttrain_core.learner.samples import SampleArrays

# What a micro-batch costs beside its tokens, in tokens: keeps the packing from making many tiny ones.
MICRO_BATCH_OVERHEAD = 64
# Attention makes a token of a row so long cost twice what one of a very short row does. Measured on CPU, forward and
# backward pass with a mask: rows of 384 tokens cost 15 % more than rows of 96, rows of 768 tokens 40 % more.
DOUBLING_LENGTH = 2048
ROW_NUMBER_FACTOR = 1.1  # between the numbers of rows that are tried


@dataclass(frozen=True)
class Block:
    """Samples with the same prompt. `num_tokens` counts it once, and no sample's last token, which predicts nothing."""

    samples: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class Row:
    """Blocks beside one another in one line of the forward pass."""

    blocks: tuple[Block, ...]

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(sample for block in self.blocks for sample in block.samples)

    @cached_property
    def num_tokens(self) -> int:
        return sum(block.num_tokens for block in self.blocks)


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


def share_prompts(samples: SampleArrays, chosen: Sequence[int], longest: int) -> list[Block]:
    """Blocks of the chosen samples; with one prompt they share a block of at most `longest` tokens (0: none shares)."""
    by_prompt: dict[bytes, list[int]] = {}
    for sample in chosen:
        by_prompt.setdefault(samples.prompt(sample), []).append(sample)
    return [block for members in by_prompt.values() for block in _blocks(samples, members, longest)]


def balance(blocks: Sequence[Block], num_parts: int) -> list[list[Block]]:
    """About the same number of tokens in each part: the longest block first, to the part that has least."""
    parts: list[list[Block]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for block in sorted(blocks, key=lambda block: (-block.num_tokens, block.samples)):
        load, part = loads[0]
        parts[part].append(block)
        heapq.heapreplace(loads, (load + block.num_tokens, part))
    return parts


def pack(blocks: Sequence[Block], budget: int, longest: int) -> list[MicroBatch]:
    """Micro-batches of rows of similar length, each with at most `budget` padded tokens (a longer row is alone).

    Blocks are joined to rows of at most `longest` tokens where that costs less: it saves padding and micro-batches, and
    makes attention dearer.
    """
    short = [block for block in blocks if block.num_tokens <= longest]
    alone = [Row((block,)) for block in blocks if block.num_tokens > longest]
    packings = [cut([*alone, *rows], budget) for rows in _joined(short, longest)]
    return min(packings, key=lambda packing: sum(map(_cost, packing)))


def cut(rows: Sequence[Row], budget: int) -> list[MicroBatch]:
    """Of all ways to cut the rows, sorted by length, the one that costs least."""
    ordered = sorted(rows, key=lambda row: (-row.num_tokens, row.samples))
    best: list[tuple[float, int]] = [(0.0, 0)]  # cost of the first `end` rows, and where their last micro-batch begins
    for end in range(1, len(ordered) + 1):
        candidates = []
        for begin in range(end - 1, -1, -1):
            num_rows, width = end - begin, ordered[begin].num_tokens
            if num_rows * width > budget and num_rows > 1:
                break
            candidates.append((best[begin][0] + _cost_of(num_rows, width), begin))
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
    blocks = share_prompts(samples, chosen, longest)
    ranks = [pack(part, budget, longest) for part in balance(blocks, num_ranks)]
    most = max(len(batches) for batches in ranks)
    return Step(chosen, tuple(tuple(batches) + ((),) * (most - len(batches)) for batches in ranks))


def _blocks(samples: SampleArrays, members: Sequence[int], longest: int) -> list[Block]:
    """Blocks of samples that have one prompt, filled in order."""
    num_prompt_tokens = samples.num_prompt_tokens(members[0])
    blocks: list[Block] = []
    for sample in members:
        span = samples.span(sample)
        added = span.stop - span.start - num_prompt_tokens - 1
        if blocks and blocks[-1].num_tokens + added <= longest:
            blocks[-1] = Block((*blocks[-1].samples, sample), blocks[-1].num_tokens + added)
        else:
            blocks.append(Block((sample,), num_prompt_tokens + added))
    return blocks


def _joined(blocks: Sequence[Block], longest: int) -> Iterator[list[Row]]:
    """The blocks as rows of at most `longest` tokens, in ways from as many rows as blocks to as few as possible."""
    num_rows = len(blocks)
    while True:
        rows = [Row(tuple(part)) for part in balance(blocks, num_rows)]
        if any(row.num_tokens > longest for row in rows):
            return
        yield rows
        if num_rows <= 1:
            return
        num_rows = int(num_rows / ROW_NUMBER_FACTOR)


def _cost(batch: MicroBatch) -> float:
    return _cost_of(len(batch), max(row.num_tokens for row in batch))


def _cost_of(num_rows: int, width: int) -> float:
    """In tokens of a very short row."""
    return num_rows * width * (1 + width / DOUBLING_LENGTH) + MICRO_BATCH_OVERHEAD
