"""The learner protocol: one policy and its optimizer, moved on by updates that are pure functions of their samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain_core.config import SftConfig
from posttrain_core.records import Message, Sample


@dataclass(frozen=True)
class Demonstration:
    """One supervised example: the prompt and the assistant's turn."""

    prompt: tuple[Message, ...]
    response: str


class Learner(Protocol):
    """Raises LearnerFault. The same calls in the same order give the same weights bit for bit (CPU, fixed threads)."""

    def start(self) -> None:
        """Begin to start whatever takes long to start, without waiting for it."""

    def load_weights(self, folder: Path) -> None:
        """Take the policy in `folder` (Hugging Face layout) with a fresh optimizer; it is also the reference policy."""

    def load_checkpoint(self, folder: Path, reference: Path) -> str:
        """Continue from what `save_checkpoint` wrote; `reference` is the folder of the reference policy. Returns what a
        user should know of it (it was written under another layout), mostly nothing."""

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Log-probabilities of every sample's tokens under the reference policy, at the sample's temperature, in the
        shape of `sampler_logprobs`. Empty tuples where the algorithm asks for no divergence from a reference."""

    def update(self, samples: Sequence[Sample], seed: int) -> Mapping[str, float]:
        """One iteration's update. Returns metrics, all finite, none of them a time.

        Samples carry their reference log-probabilities. Raises PolicyMismatch, before anything changed, when sampler
        and learner log-probabilities differ by more than `algorithm.mismatch` allows.
        """

    def sft(self, demonstrations: Sequence[Demonstration], config: SftConfig, seed: int) -> Mapping[str, float]:
        """Supervised training of the held policy on the responses' tokens. Same promises as `update`."""

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float) -> list[float]:
        """Log-probabilities of the response's tokens under the held policy (probe tokens)."""

    def save_checkpoint(self, folder: Path) -> None:
        """Weights, optimizer and position. Random streams begin anew from the seed of each call."""

    def export_policy(self, folder: Path) -> None:
        """Consolidated safetensors, config, tokenizer and chat template: what a sampler loads."""

    def close(self) -> None: ...
