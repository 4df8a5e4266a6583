"""A micro-batch as padded arrays: pure numpy, so that its geometry can be tested without torch.

Legend: B rows padded on the right to L tokens, M learned tokens (flat), S sequences of the micro-batch.

Two samples with the prompt p q and the responses a b c and d e, in one row. The last token of a response predicts
nothing and is left out:

    input_ids     p q a b d
    segment       0 0 1 1 2        a token sees the prompt (0) and its own segment, never a neighbour's
    position_ids  0 1 2 3 2
    target        a b c d e
    column        1 2 3 1 4        a and d are predicted by q
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from posttrain_core.learner.batching import Row
from posttrain_core.learner.samples import Floats, Ints, SampleArrays


@dataclass(frozen=True)
class Batch:
    """`visible` is None where plain causal attention is right: no row is shared, and padding comes last."""

    input_ids: Ints  # B x L
    position_ids: Ints  # B x L
    visible: NDArray[np.bool_] | None  # B x L x L
    index: Ints  # M: where the token is among the samples' tokens
    row: Ints  # M
    column: Ints  # M: the position that predicts the token
    target: Ints  # M
    sampler_logprobs: Floats  # M
    advantage: Floats  # M
    temperature: Floats  # M
    weight: Floats  # M
    sequence: Ints  # M
    num_sequences: int

    @property
    def first_column(self) -> int:
        """No logits are needed before this position."""
        return int(self.column.min())


def collate(samples: SampleArrays, rows: Sequence[Row], weights: Floats) -> Batch:
    """`weights` is the weight of a learned token of each sample (N floats, as `token_weights` gives them)."""
    width = max(row.num_tokens for row in rows)
    input_ids, position_ids, segment = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(3))
    columns, indices = [], []  # of the learned tokens of each sequence
    for number, row in enumerate(rows):
        end = samples.num_prompt_tokens(row.samples[0])
        input_ids[number, :end] = samples.tokens[samples.span(row.samples[0])][:end]
        position_ids[number, :end] = np.arange(end)
        for order, sample in enumerate(row.samples, start=1):
            num_prompt_tokens, span = samples.num_prompt_tokens(sample), samples.span(sample)
            response = np.arange(span.start + num_prompt_tokens, span.stop)
            begin, end = end, end + len(response) - 1
            input_ids[number, begin:end] = samples.tokens[response[:-1]]
            position_ids[number, begin:end] = num_prompt_tokens + np.arange(end - begin)
            segment[number, begin:end] = order
            predicting = np.concatenate([[num_prompt_tokens - 1], np.arange(begin, end)])
            learned = samples.loss_mask[response] == 1
            columns.append(predicting[learned])
            indices.append(response[learned])
        segment[number, end:] = len(row.samples) + 1
    chosen = np.array([sample for row in rows for sample in row.samples])
    row_of = np.repeat(np.arange(len(rows)), [len(row.samples) for row in rows])
    counts = [len(index) for index in indices]
    index = np.concatenate(indices)
    return Batch(
        input_ids=input_ids,
        position_ids=position_ids,
        visible=_visible(segment) if len(chosen) > len(rows) else None,
        index=index,
        row=np.repeat(row_of, counts),
        column=np.concatenate(columns),
        target=samples.tokens[index],
        sampler_logprobs=samples.sampler_logprobs[index],
        advantage=np.repeat(samples.advantage[chosen], counts),
        temperature=np.repeat(samples.temperature[chosen], counts),
        weight=np.repeat(weights[chosen], counts),
        sequence=np.repeat(np.arange(len(chosen)), counts),
        num_sequences=len(chosen),
    )


def _visible(segment: Ints) -> NDArray[np.bool_]:
    """Which key (last axis) each query sees."""
    keys, queries = segment[:, None, :], segment[:, :, None]
    earlier = np.tri(segment.shape[1], dtype=np.bool_)
    return np.asarray(earlier & ((keys == 0) | (keys == queries)))
