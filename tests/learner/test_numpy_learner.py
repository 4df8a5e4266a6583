"""The numpy learner: one step by hand, resume, faults."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from posttrain_core.config import MismatchConfig, NumpyLearnerConfig, SftConfig
from posttrain_core.errors import LearnerFault, PolicyMismatch
from posttrain_core.learner.numpy_learner import NumpyLearner, init_policy
from posttrain_core.records import Sample


def sample(answer: int, advantage: float) -> Sample:
    return Sample(
        rollout_id="r",
        group_id="g",
        domain="d",
        segment=0,
        input_ids=(65, 256 + answer, 120),
        loss_mask=(0, 1, 1),
        sampler_logprobs=(0.0, -1.0, 0.0),
        reward=0.0,
        advantage=advantage,
        temperature=1.0,
    )


def logits(learner: NumpyLearner, folder: Path) -> list[float]:
    learner.export_policy(folder)
    values: list[float] = load_file(folder / "model.safetensors")["logits"].tolist()
    return values


def make_learner() -> NumpyLearner:
    return NumpyLearner(NumpyLearnerConfig(learning_rate=0.5), MismatchConfig())


@pytest.fixture
def learner(tmp_path: Path) -> NumpyLearner:
    init_policy(tmp_path / "v0", num_answers=2)
    learner = make_learner()
    learner.load_weights(tmp_path / "v0")
    return learner


def test_one_update_is_the_policy_gradient(learner: NumpyLearner, tmp_path: Path) -> None:
    metrics = learner.update([sample(0, 1.0), sample(1, -1.0)], seed=0)
    # mean of +1 * (0.5, -0.5) and -1 * (-0.5, 0.5), times 0.5
    assert logits(learner, tmp_path / "v1") == [0.25, -0.25]
    assert all(np.isfinite(value) for value in metrics.values())


def test_score_gives_the_answer_its_probability_and_the_rest_none(learner: NumpyLearner) -> None:
    learner.update([sample(0, 1.0)], seed=0)
    # logits 0.25 and -0.25, temperature 0.5
    expected = -np.log(1 + np.exp(-1.0))
    assert learner.score([65], [256, 120], temperature=0.5) == pytest.approx([expected, 0.0])


def test_a_checkpoint_resumes_bit_for_bit(learner: NumpyLearner, tmp_path: Path) -> None:
    learner.update([sample(0, 1.0)], seed=0)
    learner.save_checkpoint(tmp_path / "checkpoint")
    learner.update([sample(1, 0.3)], seed=1)
    other = make_learner()
    other.load_checkpoint(tmp_path / "checkpoint", reference=tmp_path / "v0")
    other.update([sample(1, 0.3)], seed=1)
    assert logits(other, tmp_path / "a") == logits(learner, tmp_path / "b")


def test_weights_alone_lose_the_momentum(learner: NumpyLearner, tmp_path: Path) -> None:
    learner.update([sample(0, 1.0)], seed=0)
    learner.export_policy(tmp_path / "v1")
    learner.update([sample(0, 1.0)], seed=1)
    other = make_learner()
    other.load_weights(tmp_path / "v1")
    other.update([sample(0, 1.0)], seed=1)
    assert logits(other, tmp_path / "a") != logits(learner, tmp_path / "b")


def test_samples_of_another_policy_are_refused_and_change_nothing(learner: NumpyLearner, tmp_path: Path) -> None:
    before = logits(learner, tmp_path / "before")
    with pytest.raises(PolicyMismatch, match=r"algorithm\.mismatch\.max_mean_difference is 0\.3"):
        learner.update([replace(sample(0, 1.0), sampler_logprobs=(0.0, -3.0, 0.0))], seed=0)
    assert logits(learner, tmp_path / "after") == before


def test_faults_say_what_to_do(learner: NumpyLearner, tmp_path: Path) -> None:
    with pytest.raises(LearnerFault, match="no supervised training"):
        learner.sft([], SftConfig(), seed=0)
    with pytest.raises(LearnerFault, match="only 2"):
        learner.update([sample(5, 1.0)], seed=0)
    with pytest.raises(LearnerFault, match="not a checkpoint"):
        learner.load_checkpoint(tmp_path / "v0", reference=tmp_path / "v0")
    with pytest.raises(LearnerFault, match="cannot read"):
        learner.load_weights(tmp_path / "nothing")
    learner.close()
    with pytest.raises(LearnerFault, match="load_weights"):
        learner.update([sample(0, 1.0)], seed=0)
