"""A micro-batch as padded arrays: pure numpy, so that its geometry can be tested without torch.

Legend: B rows padded on the right to L tokens, M learned tokens (flat), S sequences of the micro-batch.

Two samples with the prompt p q and the responses a b c and d e, and one with the prompt r s and the response f g, as
one row of two blocks. The last token of a response predicts nothing and is left out:

    input_ids     p q a b d r s f
    segment       0 0 2 2 4 5 5 7    where the token's prompt or response begins
    prompt        0 0 0 0 0 5 5 5    where its block's prompt begins: it sees this segment and its own, nothing else
    position_ids  0 1 2 3 2 0 1 2
    target        a b c d e f g
    column        1 2 3 1 4 6 7      a and d are predicted by q
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from posttrain_core.learner.batching import Row
from posttrain_core.learner.samples import Floats, Ints, SampleArrays


@dataclass(frozen=True)
class Batch:
    """`visible` is None where plain causal attention is right: every row holds one sample, and padding comes last."""

    input_ids: Ints  # B x L
    position_ids: Ints  # B x L
    visible: NDArray[np.bool_] | None  # B x L x L
    index: Ints  # M: where the token is among the samples' tokens
    row: Ints  # M
    column: Ints  # M: the position that predicts the token
    target: Ints  # M
    sampler_logprobs: Floats  # M
    reference_logprobs: Floats | None  # M
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
    input_ids, position_ids, segment, prompt = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(4))
    columns, indices = [], []  # of the learned tokens of each sequence
    for number, row in enumerate(rows):
        end = 0
        for block in row.blocks:
            first, num_prompt_tokens = samples.span(block.samples[0]), samples.num_prompt_tokens(block.samples[0])
            start, end = end, end + num_prompt_tokens
            input_ids[number, start:end] = samples.tokens[first][:num_prompt_tokens]
            position_ids[number, start:end] = np.arange(num_prompt_tokens)
            segment[number, start:end] = start
            for sample in block.samples:
                response = np.arange(samples.span(sample).start + num_prompt_tokens, samples.span(sample).stop)
                begin, end = end, end + len(response) - 1
                input_ids[number, begin:end] = samples.tokens[response[:-1]]
                position_ids[number, begin:end] = num_prompt_tokens + np.arange(end - begin)
                segment[number, begin:end] = begin
                predicting = np.concatenate([[start + num_prompt_tokens - 1], np.arange(begin, end)])
                learned = samples.loss_mask[response] == 1
                columns.append(predicting[learned])
                indices.append(response[learned])
            prompt[number, start:end] = start
        segment[number, end:] = prompt[number, end:] = end
    chosen = np.array([sample for row in rows for sample in row.samples])
    row_of = np.repeat(np.arange(len(rows)), [len(row.samples) for row in rows])
    counts = [len(index) for index in indices]
    index = np.concatenate(indices)
    return Batch(
        input_ids=input_ids,
        position_ids=position_ids,
        visible=_visible(segment, prompt) if len(chosen) > len(rows) else None,
        index=index,
        row=np.repeat(row_of, counts),
        column=np.concatenate(columns),
        target=samples.tokens[index],
        sampler_logprobs=samples.sampler_logprobs[index],
        reference_logprobs=samples.reference_logprobs[index] if len(samples.reference_logprobs) else None,
        advantage=np.repeat(samples.advantage[chosen], counts),
        temperature=np.repeat(samples.temperature[chosen], counts),
        weight=np.repeat(weights[chosen], counts),
        sequence=np.repeat(np.arange(len(chosen)), counts),
        num_sequences=len(chosen),
    )


def _visible(segment: Ints, prompt: Ints) -> NDArray[np.bool_]:
    """Which key (last axis) each query sees."""
    keys = segment[:, None, :]
    earlier = np.tri(segment.shape[1], dtype=np.bool_)
    return np.asarray(earlier & ((keys == segment[:, :, None]) | (keys == prompt[:, :, None])))
