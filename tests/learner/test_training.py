"""The training loops on plain torch: what a step computes must not depend on how it is cut."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain_core.config import AlgorithmConfig, DeepSpeedLearnerConfig, SftConfig
from posttrain_core.errors import LearnerFault, PolicyMismatch
from posttrain_core.learner.batching import plan_steps
from posttrain_core.learner.presets import resolve
from posttrain_core.learner.samples import SampleArrays, from_demonstrations, from_records
from tests.learner.llama import make_samples

torch = pytest.importorskip("torch")
model = pytest.importorskip("posttrain_core.learner.model")
training = pytest.importorskip("posttrain_core.learner.training")

RANK = model.Rank(0, 1, torch.device("cpu"))


class PlainEngine:
    """The engine's part on one process, by gradient descent; keeps the gradient of its last step."""

    def __init__(self, folder: Path, longest_shared_row: int = 512) -> None:
        self.rank, self.num_steps, self.longest_shared_row = RANK, 0, longest_shared_row
        self.model: Any = model.load_model(folder, "float32", RANK.device)
        self.num_passes = 0
        self.learning_rates: list[float] = []

    def forward(self, batch: Any) -> Any:
        self.num_passes += 1
        return model.forward(self.model, batch, RANK.device)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def step(self, learning_rate: float, weight_decay: float) -> float:
        self.gradient = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= learning_rate * parameter.grad
        self.model.zero_grad()
        self.num_steps += 1
        self.learning_rates.append(learning_rate)
        return float(self.gradient.norm())


def run(engine: PlainEngine, arrays: SampleArrays, algorithm: dict[str, Any], **learner: Any) -> dict[str, float]:
    config = DeepSpeedLearnerConfig.model_validate({"learning_rate": 0.1, **learner})
    resolved = resolve(AlgorithmConfig.model_validate(algorithm))
    return dict(training.reinforce(engine, arrays, resolved, config, 8, 1, lambda done, total: None))


def logprobs(engine: PlainEngine, arrays: SampleArrays) -> Any:
    return training.logprobs(engine, engine.forward, arrays, DeepSpeedLearnerConfig())


def agreeing(engine: PlainEngine, arrays: SampleArrays) -> SampleArrays:
    """The samples as if the engine's policy had sampled them."""
    return replace(arrays, sampler_logprobs=logprobs(engine, arrays))


NO_LIMITS = {"mismatch": {"max_mean_difference": None, "max_kl": None, "min_ess_share": None}}


@pytest.fixture
def arrays() -> SampleArrays:
    return from_records(make_samples())


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce", "gspo", "cispo"])
def test_gradient_does_not_depend_on_micro_batches_or_shared_rows(
    preset: str, policy: Path, arrays: SampleArrays
) -> None:
    whole, cut, alone = PlainEngine(policy), PlainEngine(policy), PlainEngine(policy, longest_shared_row=0)
    settings = {"preset": preset, "entropy_coefficient": 0.01}
    metrics = [
        run(whole, arrays, settings),
        run(cut, arrays, settings, tokens_per_micro_batch=20),
        run(alone, arrays, settings),
    ]
    assert cut.num_passes > whole.num_passes
    for engine, values in ((cut, metrics[1]), (alone, metrics[2])):
        torch.testing.assert_close(engine.gradient, whole.gradient, rtol=1e-4, atol=1e-6)
        for name in set(values) - {"padding_share"}:
            assert values[name] == pytest.approx(metrics[0][name], rel=1e-4, abs=1e-6), name


def test_no_token_sees_another_sample_or_block(policy: Path) -> None:
    """Packed and unpacked gradients agree; one bit too many in one mask is far beyond the tolerance."""
    arrays = from_records(make_samples(num_groups=6))
    (step,) = plan_steps(arrays, 1, 1, 1, 8192, 512, seed=1)
    assert max(len(row.blocks) for batch in step.ranks[0] for row in batch) >= 3

    class Leaking(PlainEngine):
        def forward(self, batch: Any) -> Any:
            at = int(batch.column[batch.row == 0].max())
            assert not batch.visible[0, at, 0]
            batch.visible[0, at, 0] = True
            return super().forward(batch)

    packed, unpacked, leaking = PlainEngine(policy), PlainEngine(policy, longest_shared_row=0), Leaking(policy)
    for engine in (packed, unpacked, leaking):
        run(engine, arrays, {})
    norm = float(unpacked.gradient.norm())
    assert float((packed.gradient - unpacked.gradient).norm()) < 2e-6 * norm
    assert float((leaking.gradient - unpacked.gradient).norm()) > 1e-5 * norm


def test_logprobs_are_those_of_an_ordinary_forward_pass(policy: Path, arrays: SampleArrays) -> None:
    engine = PlainEngine(policy)
    for sample in range(4):
        tokens, prompt = arrays.tokens[arrays.span(sample)].tolist(), arrays.num_prompt_tokens(sample)
        with torch.no_grad():
            logits = engine.model(torch.tensor([tokens])).logits[0] / 0.7
        expected = [float(torch.log_softmax(logits[at - 1], 0)[tokens[at]]) for at in range(prompt, len(tokens))]
        assert training.score(engine, tokens[:prompt], tokens[prompt:], 0.7) == pytest.approx(expected, abs=1e-5)


def test_one_step_makes_no_extra_pass_and_several_do(policy: Path, arrays: SampleArrays) -> None:
    one, two = PlainEngine(policy), PlainEngine(policy)
    assert run(one, arrays, {})["num_steps"] == 1
    assert one.num_passes == 1
    assert run(two, arrays, {}, epochs=2)["num_steps"] == 2
    assert two.num_passes == 3


def test_the_second_pass_over_the_samples_is_clipped(policy: Path, arrays: SampleArrays) -> None:
    assert run(PlainEngine(policy), arrays, {})["clip_fraction"] == 0.0
    tight = {"clip_low": 1e-6, "clip_high": 1e-6}
    assert run(PlainEngine(policy), arrays, tight, epochs=2)["clip_fraction"] > 0.1


def test_kl_is_zero_at_the_reference_and_pulls_back_from_elsewhere(policy: Path, arrays: SampleArrays) -> None:
    settings = {"kl": {"estimator": "k3", "coefficient": 1.0}} | NO_LIMITS
    engine = PlainEngine(policy)
    silent = replace(arrays, advantage=arrays.advantage * 0, reference_logprobs=logprobs(engine, arrays))
    assert run(engine, silent, settings)["kl"] == 0.0
    run(engine, arrays, NO_LIMITS, learning_rate=1.0)
    passes = engine.num_passes
    away = run(engine, silent, settings)["kl"]
    assert engine.num_passes == passes + 1, "the reference's values are given, not computed"
    assert away > 0
    assert run(engine, silent, settings)["kl"] < away


def test_a_divergence_needs_the_references_values(policy: Path, arrays: SampleArrays) -> None:
    with pytest.raises(LearnerFault, match="no reference log-probabilities"):
        run(PlainEngine(policy), arrays, {"kl": {}})


def test_logprobs_have_the_shape_of_the_samplers(policy: Path, arrays: SampleArrays) -> None:
    engine = PlainEngine(policy)
    values = logprobs(engine, arrays)
    assert values.shape == arrays.sampler_logprobs.shape
    assert not values[arrays.loss_mask == 0].any()
    tokens, prompt = arrays.tokens[arrays.span(3)].tolist(), arrays.num_prompt_tokens(3)
    expected = training.score(engine, tokens[:prompt], tokens[prompt:], 1.0)
    assert values[arrays.span(3)][prompt:].tolist() == pytest.approx(expected, abs=1e-5)


def test_sampler_difference_and_effective_sample_size(policy: Path, arrays: SampleArrays) -> None:
    arrays = agreeing(PlainEngine(policy), arrays)
    metrics = run(PlainEngine(policy), arrays, {})
    assert metrics["logprob_difference_max"] < 1e-5
    assert metrics["sampler_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["ess_share"] == pytest.approx(1.0)
    assert metrics["entropy"] == pytest.approx(math.log(21), abs=0.1)
    # One token that the sampler thought e times likelier: a difference of 1.
    first = int(arrays.loss_mask.argmax())
    arrays.sampler_logprobs[first] += 1.0
    once, twice = run(PlainEngine(policy), arrays, {}), run(PlainEngine(policy), arrays, {}, epochs=2)
    for metrics in (once, twice):
        assert metrics["logprob_difference_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["logprob_difference_mean"] == pytest.approx(1.0 / once["tokens"], abs=1e-5)
        assert metrics["sampler_kl"] == pytest.approx(math.exp(-1) / once["tokens"], abs=1e-5)
        weights = [1.0] * (int(once["tokens"]) - 1) + [math.exp(-1)]
        expected = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
        assert metrics["ess_share"] == pytest.approx(expected)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    ("shift", "setting"),
    [(-1.0, "max_mean_difference"), (2.0, "max_mean_difference"), (math.nan, "max_mean_difference")],
)
def test_a_mismatch_stops_before_the_first_step(
    shift: float, setting: str, epochs: int, policy: Path, arrays: SampleArrays
) -> None:
    engine = PlainEngine(policy)
    arrays = agreeing(engine, arrays)
    before = torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()])
    arrays.sampler_logprobs[arrays.loss_mask == 1] += shift
    with pytest.raises(PolicyMismatch, match=rf"is {abs(shift):g}, algorithm\.mismatch\.{setting} is 0\.3"):
        run(engine, arrays, {}, epochs=epochs)
    assert engine.num_steps == 0
    assert torch.equal(before, torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()]))


def test_a_token_that_the_sampler_held_impossible_gives_finite_metrics(policy: Path, arrays: SampleArrays) -> None:
    metrics = run(PlainEngine(policy), replace(arrays, sampler_logprobs=arrays.sampler_logprobs * 3000), NO_LIMITS)
    assert all(math.isfinite(value) for value in metrics.values())
    assert "kl" not in metrics


def test_truncation_bounds_what_an_unlikely_token_weighs(policy: Path, arrays: SampleArrays) -> None:
    surprising = replace(arrays, sampler_logprobs=arrays.sampler_logprobs * 10)
    settings = {"preset": "rloo", "importance": {"type": "none"}} | NO_LIMITS
    plain, capped, dropped = PlainEngine(policy), PlainEngine(policy), PlainEngine(policy)
    run(plain, surprising, settings)
    run(capped, surprising, settings | {"importance": {"type": "truncated", "limit": 3.0}})
    run(dropped, surprising, settings | {"importance": {"type": "masked", "limit": 3.0}})
    torch.testing.assert_close(capped.gradient, 3 * plain.gradient)
    assert float(dropped.gradient.abs().max()) == 0.0


def test_warm_up_is_linear_and_then_constant(policy: Path, arrays: SampleArrays) -> None:
    engine = PlainEngine(policy)
    metrics = run(engine, arrays, {}, warmup_steps=4, epochs=3, steps_per_iteration=2)
    assert engine.learning_rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert metrics["learning_rate"] == pytest.approx(0.1)


def test_imitation_learns_its_demonstrations(policy: Path) -> None:
    engine = PlainEngine(policy)
    demonstrations = from_demonstrations([[1, 5, 6]] * 16 + [[1, 7, 8]] * 16, [[9, 10, 2]] * 16 + [[11, 2]] * 16)
    sft = SftConfig(epochs=30, batch_size=16, learning_rate=0.4, warmup_steps=2)
    seen: list[tuple[int, int]] = []
    metrics = training.imitate(engine, demonstrations, sft, 8192, 0, lambda done, total: seen.append((done, total)))
    assert metrics["first_loss"] == pytest.approx(math.log(21), abs=0.3)
    assert metrics["loss"] < 0.2
    assert seen == [(done, 60) for done in range(1, 61)]
    assert engine.learning_rates[0] == pytest.approx(0.2)
    assert engine.learning_rates[1] == pytest.approx(0.4)
    assert engine.learning_rates[-1] < 0.01
    assert training.score(engine, [1, 5, 6], [9, 10, 2], 1.0) == pytest.approx([0.0] * 3, abs=0.3)
