"""The scripted sampler: a policy that is one vector of logits over a fixed list of answers. For tests.

Policy folder: `model.safetensors` with the float64 vector "logits" [K], K the number of configured responses.

    encode   utf-8 bytes of one "role:content" line per message
    sample   k ~ softmax(logits / temperature); ids (256 + k, *utf-8 bytes of responses[k])
             with log-probabilities (log p_k, 0, 0, ...)
    decode   ids of 256 and above dropped
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from posttrain_core.config import ScriptedSamplerConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.records import FinishReason, Message
from posttrain_core.sampling.protocol import Completion, OnDone, Probe, SampleRequest
from posttrain_core.sampling.stopping import Ending

ANSWER_BASE = 256  # ids below are bytes


def answer_logprobs(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities [K] of the answers; those at temperature 1 when `temperature` is 0 (greedy)."""
    scaled = logits / (temperature or 1.0)
    shifted = scaled - scaled.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), dtype=np.float64)


class ScriptedSampler:
    """A `Sampler` without a network: what it can say is listed in the configuration, how often is learnt."""

    context_length = 4096

    def __init__(self, config: ScriptedSamplerConfig) -> None:
        self._answers = [(ANSWER_BASE + index, *response.encode()) for index, response in enumerate(config.responses)]
        self._logits: np.ndarray | None = None

    def load_policy(self, version: int, folder: Path, probes: Sequence[Probe] = ()) -> None:
        """Reads the logits; a file that does not fit the responses raises SamplerUnavailable."""
        path = folder / "model.safetensors"
        try:
            logits = load_file(path)["logits"]
        except (OSError, SafetensorError, KeyError) as error:
            raise SamplerUnavailable(
                f"policy version {version}: no vector 'logits' can be read from {path} ({error}); "
                "publish the version again or resume the run"
            ) from error
        if logits.shape != (len(self._answers),):
            raise SamplerUnavailable(
                f"policy version {version}: 'logits' in {path} has shape {logits.shape}, but sampler.responses lists "
                f"{len(self._answers)} answers; restore the list the policy was made with"
            )
        self._logits = logits.astype(np.float64)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple("".join(f"{message.role}:{message.content}\n" for message in messages).encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < ANSWER_BASE).decode(errors="replace")

    def sample(self, requests: Sequence[SampleRequest], on_done: OnDone | None = None) -> list[Completion]:
        if self._logits is None:
            raise SamplerUnavailable("sample() before load_policy(): load a policy version first")
        return [self._answer(request, self._logits) for request in requests]

    def release(self) -> None:
        return

    def close(self) -> None:
        self._logits = None

    def _answer(self, request: SampleRequest, logits: np.ndarray) -> Completion:
        room = min(request.max_new_tokens, self.context_length - len(request.prompt_ids))
        if room < 1:
            return Completion((), (), FinishReason.REFUSED)
        logprobs = answer_logprobs(logits, request.temperature)
        chosen = int(logits.argmax()) if request.temperature == 0 else self._draw(logprobs, request.seed)
        ids, finish = self._until_end(self._answers[chosen], replace(request, max_new_tokens=room))
        return Completion(ids, (float(logprobs[chosen]), *(0.0 for _ in ids[1:])), finish)

    def _until_end(self, answer: tuple[int, ...], request: SampleRequest) -> tuple[tuple[int, ...], FinishReason]:
        """The policy ends its turn with the last byte of the answer, if nothing ends it before."""
        ending = Ending(request, frozenset(), self.decode)
        for length, token in enumerate(answer, start=1):
            reason = ending.add(token)
            if reason is FinishReason.LENGTH and length == len(answer):
                break
            if reason is not None:
                return answer[:length], reason
        return answer, FinishReason.STOP

    @staticmethod
    def _draw(logprobs: np.ndarray, seed: int) -> int:
        uniform = np.random.Generator(np.random.Philox(key=seed)).random()
        return min(int(np.searchsorted(np.exp(logprobs).cumsum(), uniform, side="right")), len(logprobs) - 1)
