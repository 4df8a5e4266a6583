"""`NumpyLearner`: a softmax over K scripted answers, partner of the scripted sampler. Milliseconds, for tests.

A policy folder holds `model.safetensors` with the float64 vector "logits" [K]. A scripted response is the token
256 + k followed by the answer's UTF-8 bytes: its first token has log-probability log_softmax(logits / temperature)[k],
the others 0. A checkpoint is the same file with the optimizer's "momentum" [K] and "step".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from posttrain_core.config import MismatchConfig, NumpyLearnerConfig, SftConfig
from posttrain_core.errors import LearnerFault
from posttrain_core.learner import mismatch
from posttrain_core.learner.protocol import Demonstration
from posttrain_core.records import Sample

FIRST_ANSWER_TOKEN = 256
MOMENTUM = 0.9
WEIGHTS_FILE = "model.safetensors"


def init_policy(folder: Path, num_answers: int) -> None:
    """Write version 0: every answer equally likely."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"logits": np.zeros(num_answers)}, folder / WEIGHTS_FILE)


class NumpyLearner:
    def __init__(self, config: NumpyLearnerConfig, limits: MismatchConfig) -> None:
        self._config, self._limits = config, limits
        self._state: dict[str, NDArray[np.float64]] | None = None

    def start(self) -> None:
        return

    def load_weights(self, folder: Path) -> None:
        logits = _read(folder)["logits"]
        self._state = {"logits": logits, "momentum": np.zeros_like(logits), "step": np.zeros(1)}

    def load_checkpoint(self, folder: Path, reference: Path) -> str:
        state = _read(folder)
        if set(state) != {"logits", "momentum", "step"}:
            raise LearnerFault(f"{folder / WEIGHTS_FILE} is not a checkpoint of the numpy learner: it has {set(state)}")
        self._state = state
        return ""

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        return [()] * len(samples)

    def update(self, samples: Sequence[Sample], seed: int) -> Mapping[str, float]:
        """One step of policy gradient: the mean over samples of advantage * (onehot(k) - softmax(logits))."""
        if not samples:
            raise LearnerFault("update got no samples: the iteration has nothing to learn from")
        state = self._held()
        answers = np.array([_answer(sample, len(state["logits"])) for sample in samples])
        measured = self._mismatch(samples)
        weights = np.array([sample.advantage for sample in samples])
        probabilities = np.exp(_log_softmax(state["logits"]))
        gradient = (np.eye(len(probabilities))[answers] - probabilities).T @ weights / len(samples)
        momentum = MOMENTUM * state["momentum"] + gradient
        logits = state["logits"] + self._config.learning_rate * momentum
        self._state = {"logits": logits, "momentum": momentum, "step": state["step"] + 1}
        return {
            "loss": float(-(weights * _log_softmax(state["logits"])[answers]).mean()),
            "grad_norm": float(np.linalg.norm(gradient)),
            "entropy": float(-(probabilities * np.log(probabilities)).sum()),
            "learning_rate": self._config.learning_rate,
            "tokens": float(sum(sum(sample.loss_mask) for sample in samples)),
            "num_steps": float(state["step"][0] + 1),
            **measured,
        }

    def sft(self, demonstrations: Sequence[Demonstration], config: SftConfig, seed: int) -> Mapping[str, float]:
        raise LearnerFault("the numpy learner has no supervised training: remove the section sft")

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float) -> list[float]:
        logprobs = _log_softmax(self._held()["logits"] / temperature)
        return [float(logprobs[response_ids[0] - FIRST_ANSWER_TOKEN])] + [0.0] * (len(response_ids) - 1)

    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self._held(), folder / WEIGHTS_FILE)

    def export_policy(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"logits": self._held()["logits"]}, folder / WEIGHTS_FILE)

    def close(self) -> None:
        self._state = None

    def _mismatch(self, samples: Sequence[Sample]) -> dict[str, float]:
        sampler, learner = [], []
        for sample in samples:
            learned = [at for at, bit in enumerate(sample.loss_mask) if bit]
            sampler += [sample.sampler_logprobs[at] for at in learned]
            learner += self.score((), [sample.input_ids[at] for at in learned], sample.temperature)
        measured = mismatch.measure(np.array(sampler), np.array(learner))
        mismatch.check(measured, self._limits)
        return measured

    def _held(self) -> dict[str, NDArray[np.float64]]:
        if self._state is None:
            raise LearnerFault("the numpy learner holds no policy: call load_weights or load_checkpoint first")
        return self._state


def _read(folder: Path) -> dict[str, NDArray[np.float64]]:
    try:
        return dict(load_file(folder / WEIGHTS_FILE))
    except (OSError, SafetensorError) as error:
        raise LearnerFault(f"cannot read the policy {folder / WEIGHTS_FILE}: {error}") from error


def _answer(sample: Sample, num_answers: int) -> int:
    """The answer that a sample gave: its first token with a loss mask of 1."""
    answer = sample.input_ids[sample.loss_mask.index(1)] - FIRST_ANSWER_TOKEN
    if not 0 <= answer < num_answers:
        raise LearnerFault(f"sample {sample.rollout_id} gives answer {answer}: the policy has only {num_answers}")
    return answer


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
