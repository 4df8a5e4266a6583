"""Each piece of the loss against values worked out by hand."""

import math

import pytest
import torch

from posttrain_core.config import AlgorithmConfig, ImportanceConfig, KlConfig
from posttrain_core.learner import losses
from posttrain_core.learner.batching import token_weights
from posttrain_core.learner.presets import resolve


def logs(*values: float) -> torch.Tensor:
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64, requires_grad=True)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(value: torch.Tensor, of: torch.Tensor) -> list[float]:
    (result,) = torch.autograd.grad(value.sum(), of)
    return [float(element) for element in result]


def test_log_distribution_applies_the_temperature() -> None:
    logits = torch.tensor([[0.0, 2 * math.log(3)]])
    values = losses.log_distribution(logits, torch.tensor([2.0]))
    assert values[0].exp().tolist() == pytest.approx([0.25, 0.75])
    assert losses.token_logprobs(values, torch.tensor([1])).tolist() == pytest.approx([math.log(0.75)])


def test_entropy_of_a_uniform_and_of_a_skewed_distribution() -> None:
    distribution = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    expected = [math.log(2), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))]
    assert losses.entropy(distribution).tolist() == pytest.approx(expected)


def test_clip_loss_is_pessimistic_on_both_sides() -> None:
    ratio, advantage = numbers(1.5, 0.5, 1.5, 0.5), numbers(1, 1, -1, -1)
    # min(r A, clip(r, 0.8, 1.28) A): 1.28, 0.5, -1.5, -0.8
    assert losses.clip_loss(ratio, advantage, 0.2, 0.28).tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8])
    assert losses.clipped_tokens(ratio, advantage, 0.2, 0.28).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_clip_loss_gives_no_gradient_beyond_the_bound() -> None:
    learner = logs(0.6, 0.3)
    ratio = losses.token_ratio(learner, logs(0.4, 0.3).detach())
    assert ratio.tolist() == pytest.approx([1.5, 1.0])
    assert gradient(losses.clip_loss(ratio, numbers(2, 2), 0.2, 0.2), learner) == pytest.approx([0.0, -2.0])


def test_sequence_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    learner, prox = logs(0.4, 0.1, 0.3), logs(0.2, 0.2, 0.1).detach()
    ratio = losses.sequence_ratio(learner, prox, torch.tensor([0, 0, 1]), 2)
    assert ratio.tolist() == pytest.approx([(2 * 0.5) ** 0.5, 1.0, 3.0])
    # The mean over a sequence's tokens of s A has the gradient A s / length at each of them.
    weighted = ratio * numbers(0.5, 0.5, 1.0)
    assert gradient(weighted, learner) == pytest.approx([0.5, 0.5, 3.0])


def test_detached_clip_keeps_a_gradient_beyond_the_bound() -> None:
    learner = logs(0.9, 0.2)
    ratio = losses.token_ratio(learner, logs(0.1, 0.4).detach())
    value = losses.detached_clip_loss(ratio, learner, numbers(2, 2), None, 5.0)
    assert value.tolist() == pytest.approx([-6 * 2 * math.log(0.9), -0.5 * 2 * math.log(0.2)])
    assert gradient(value, learner) == pytest.approx([-12.0, -1.0])


def test_plain_loss_is_the_policy_gradient() -> None:
    learner = logs(0.5, 0.25)
    assert gradient(losses.plain_loss(learner, numbers(2, -1)), learner) == pytest.approx([-2.0, 1.0])


@pytest.mark.parametrize(
    ("kind", "expected"), [("none", [1, 1, 1, 1]), ("truncated", [2, 2, 0.1, 1]), ("masked", [0, 2, 0, 1])]
)
def test_importance_weight(kind: str, expected: list[float]) -> None:
    config = ImportanceConfig.model_validate({"type": kind, "limit": 2.0 + 1e-9})
    weight = losses.importance_weight(logs(0.8, 0.4, 0.02, 0.2), logs(0.2, 0.2, 0.2, 0.2), config)
    assert weight.tolist() == pytest.approx(expected)
    assert not weight.requires_grad


def test_kl_estimators_and_their_gradients() -> None:
    log_ratio = math.log(2)
    values = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": 0.5 - 1 + log_ratio}
    gradients = {"k1": log_ratio, "k2": log_ratio, "k3": 1 - 0.5}
    for estimator, value in values.items():
        learner = logs(0.4)
        divergence = losses.kl(learner, logs(0.2).detach(), KlConfig.model_validate({"estimator": estimator}))
        assert divergence.tolist() == pytest.approx([value]), estimator
        assert gradient(divergence, learner) == pytest.approx([gradients[estimator]]), estimator


# Two sequences, of 2 and 1 tokens, on policy: every ratio is 1, so a preset's gradient is -advantage * weight.
@pytest.mark.parametrize(
    ("preset", "weights"),
    [
        ("grpo", [1 / 4, 1 / 4, 1 / 2]),
        ("dr_grpo", [1 / 20, 1 / 20, 1 / 20]),
        ("dapo", [1 / 3, 1 / 3, 1 / 3]),
        ("rloo", [1 / 2, 1 / 2, 1 / 2]),
        ("reinforce", [1 / 2, 1 / 2, 1 / 2]),
        ("gspo", [1 / 4, 1 / 4, 1 / 2]),
        ("cispo", [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_gradient_of_each_preset_on_policy(preset: str, weights: list[float]) -> None:
    algorithm = resolve(AlgorithmConfig.model_validate({"preset": preset}))
    learner, advantage, sequence = logs(0.3, 0.6, 0.2), numbers(2, 2, -1), torch.tensor([0, 0, 1])
    value, clipped = losses.policy_loss(algorithm, learner, learner.detach(), advantage, sequence, 2)
    by_sequence = token_weights(algorithm.normalizer, [2, 1], constant=10)
    weighted = value * torch.from_numpy(by_sequence)[sequence]
    expected = [-2 * weights[0], -2 * weights[1], weights[2]]
    assert gradient(weighted, learner) == pytest.approx(expected)
    assert clipped.sum() == 0


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # ratios 2 and 0.5, advantages 1 and -1
        ("grpo", [-1.2, 0.8]),
        ("dapo", [-1.28, 0.8]),
        ("dr_grpo", [-1.2, 0.8]),
        ("gspo", [-1.0004, 1 - 3e-4]),
        ("cispo", [-2 * math.log(0.4), 0.5 * math.log(0.1)]),
        ("rloo", [-math.log(0.4), math.log(0.1)]),
        ("reinforce", [-math.log(0.4), math.log(0.1)]),
    ],
)
def test_value_of_each_preset_off_policy(preset: str, expected: list[float]) -> None:
    algorithm = resolve(AlgorithmConfig.model_validate({"preset": preset}))
    learner, prox = logs(0.4, 0.1), logs(0.2, 0.2).detach()
    value, _ = losses.policy_loss(algorithm, learner, prox, numbers(1, -1), torch.tensor([0, 1]), 2)
    assert value.tolist() == pytest.approx(expected)
