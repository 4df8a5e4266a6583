"""`SampleArrays`: an iteration's samples as flat arrays, and the file that hands them to the rank processes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from posttrain_core.errors import LearnerFault
from posttrain_core.records import Sample

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SampleArrays:
    """N samples, their tokens one after another; sample i has `tokens[starts[i] : starts[i + 1]]` (starts: N + 1)."""

    tokens: Ints
    loss_mask: Ints
    sampler_logprobs: Floats
    reference_logprobs: Floats  # empty when no divergence from a reference policy is asked for
    starts: Ints
    group: Ints  # N: the number of the sample's group
    advantage: Floats  # N
    temperature: Floats  # N

    def __len__(self) -> int:
        return len(self.group)

    def span(self, sample: int) -> slice:
        return slice(int(self.starts[sample]), int(self.starts[sample + 1]))

    def num_prompt_tokens(self, sample: int) -> int:
        """Tokens before the first one that is learned from."""
        return int(np.argmax(self.loss_mask[self.span(sample)]))

    def prompt(self, sample: int) -> bytes:
        """The prompt's tokens as a key."""
        return self.tokens[self.span(sample)][: self.num_prompt_tokens(sample)].tobytes()

    def num_learned_tokens(self, sample: int) -> int:
        return int(self.loss_mask[self.span(sample)].sum())


def from_records(samples: Sequence[Sample]) -> SampleArrays:
    """Raises LearnerFault for a sample without anything to learn from, or whose columns differ in length."""
    for sample in samples:
        if not len(sample.input_ids) == len(sample.loss_mask) == len(sample.sampler_logprobs):
            raise LearnerFault(f"sample {sample.rollout_id}: input_ids, loss_mask, sampler_logprobs differ in length")
        if len(sample.reference_logprobs) != (len(sample.input_ids) if samples[0].reference_logprobs else 0):
            raise LearnerFault(f"sample {sample.rollout_id}: reference_logprobs are neither there for all nor for none")
        if 1 not in sample.loss_mask or sample.loss_mask[0]:
            raise LearnerFault(f"sample {sample.rollout_id}: it needs a prompt and at least one token to learn from")
    groups = {group: number for number, group in enumerate(dict.fromkeys(sample.group_id for sample in samples))}
    return SampleArrays(
        tokens=np.array([token for sample in samples for token in sample.input_ids], dtype=np.int64),
        loss_mask=np.array([bit for sample in samples for bit in sample.loss_mask], dtype=np.int64),
        sampler_logprobs=np.array([value for sample in samples for value in sample.sampler_logprobs], dtype=np.float64),
        reference_logprobs=np.array([value for sample in samples for value in sample.reference_logprobs], dtype=float),
        starts=np.cumsum([0, *(len(sample.input_ids) for sample in samples)], dtype=np.int64),
        group=np.array([groups[sample.group_id] for sample in samples], dtype=np.int64),
        advantage=np.array([sample.advantage for sample in samples], dtype=np.float64),
        temperature=np.array([sample.temperature for sample in samples], dtype=np.float64),
    )


def from_demonstrations(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> SampleArrays:
    """Supervised examples as samples whose advantage is 1, each a group of its own."""
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    pairs = list(zip(prompts, responses, strict=True))
    return SampleArrays(
        tokens=np.array([token for pair in pairs for part in pair for token in part], dtype=np.int64),
        loss_mask=np.array([bit for bit, part in _masked(pairs) for _ in part], dtype=np.int64),
        sampler_logprobs=np.zeros(sum(lengths)),
        reference_logprobs=np.zeros(0),
        starts=np.cumsum([0, *lengths], dtype=np.int64),
        group=np.arange(len(pairs)),
        advantage=np.ones(len(pairs)),
        temperature=np.ones(len(pairs)),
    )


def save(samples: SampleArrays, path: Path) -> None:
    np.savez(path, **{field.name: getattr(samples, field.name) for field in fields(samples)})


def load(path: Path) -> SampleArrays:
    with np.load(path) as arrays:
        return SampleArrays(**{field.name: arrays[field.name] for field in fields(SampleArrays)})


def _masked(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[int, Sequence[int]]]:
    return [(bit, part) for pair in pairs for bit, part in enumerate(pair)]
