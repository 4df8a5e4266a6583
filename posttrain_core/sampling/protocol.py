"""The sampler protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain_core.records import FinishReason, Message


@dataclass(frozen=True)
class SampleRequest:
    """One completion to make. `seed` alone decides its random stream, whoever its neighbours are."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int
    temperature: float  # 0.0 is greedy


@dataclass(frozen=True)
class Completion:
    """T tokens that the policy emitted, its end token included when it ended by itself.

    `logprobs` (T floats) are natural logarithms under the distribution actually sampled from (temperature applied);
    under greedy decoding, under the unscaled distribution.
    """

    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


class Sampler(Protocol):
    """Holds one policy version at a time. `load_policy` comes before anything else. Raises SamplerUnavailable."""

    def load_policy(self, version: int, folder: Path) -> None:
        """Swap to the policy in `folder` (Hugging Face layout). A no-op when `version` from the same folder is held."""

    @property
    def context_length(self) -> int:
        """Prompt plus response tokens that the policy can hold."""

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Prompt token ids through the policy's chat template, ready for the assistant's turn."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """One completion per request, in order. Safe to call from several threads (calls are served one by one)."""

    def close(self) -> None: ...
