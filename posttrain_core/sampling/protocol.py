"""The sampler protocol."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain_core.config import RepetitionConfig
from posttrain_core.records import FinishReason, Message


@dataclass(frozen=True)
class SampleRequest:
    """One completion to make. `seed` alone decides its random stream, whoever its neighbours are."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int
    temperature: float  # 0.0 is greedy
    stop: tuple[str, ...] = ()  # ends with the first token after which the text holds one of them; it is kept
    repetition: RepetitionConfig | None = None  # ends with the first token after which the rule holds


@dataclass(frozen=True)
class Probe:
    """Tokens with their log-probabilities under a policy version at temperature 1: what proves that it is held."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Completion:
    """T tokens that the policy emitted, its end token included when it ended by itself.

    `logprobs` (T floats) are natural logarithms under the distribution actually sampled from (temperature applied);
    under greedy decoding, under the unscaled distribution.
    """

    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


OnDone = Callable[[int, Completion], None]


class Sampler(Protocol):
    """Holds one policy version at a time. `load_policy` comes before anything else. Raises SamplerUnavailable."""

    def load_policy(self, version: int, folder: Path, probes: Sequence[Probe] = ()) -> None:
        """Swap to the policy in `folder` (Hugging Face layout). A no-op when `version` from the same folder is held.

        A sampler that holds its weights elsewhere (a server) proves by the probes that it holds this version before it
        samples anything.
        """

    @property
    def context_length(self) -> int:
        """Prompt plus response tokens that the policy can hold."""

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Prompt token ids through the policy's chat template, ready for the assistant's turn."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""

    def sample(self, requests: Sequence[SampleRequest], on_done: OnDone | None = None) -> list[Completion]:
        """One completion per request, in order. Safe to call from several threads.

        A sampler whose requests end at different times tells `on_done` the index and the completion of each as it ends,
        from any thread but never two at once; one that computes a batch as a whole need not.
        """

    def release(self) -> None:
        """Give up device memory until the next load_policy, where the configuration asks for it; else nothing."""

    def close(self) -> None: ...
