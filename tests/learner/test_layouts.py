"""The learner under every layout: ZeRO stages, numbers of ranks, offload, precision, and from one to another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.learner.llama import make_samples
from tests.learner.rank_group import Ranks, started, whole_state

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

FIRST, SECOND = make_samples(seed=1), make_samples(seed=2)
SMALL = 40  # tokens of a micro-batch: several of them in each step


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_from_any_layout_to_any_other_bit_for_bit(
    dtype: str, one: Ranks, two: Ranks, policy: Path, tmp_path: Path
) -> None:
    two.configure(dtype=dtype, zero_stage=2, tokens_per_micro_batch=SMALL)
    two.load(policy)
    two.update(FIRST, seed=1)
    two.update(FIRST, seed=2)
    written = whole_state(two.save(tmp_path / "written"))
    exported = two.export(tmp_path / "policy")
    metrics = two.update(SECOND, seed=3)
    after = whole_state(two.save(tmp_path / "after"))
    assert {key.partition("/")[0] for key in written} == {"weight", "exp_avg", "exp_avg_sq"}
    layouts = [(ranks, stage) for stage in (0, 1, 2, 3) for ranks in (one, two)]
    source = tmp_path / "written"
    for ranks, stage in layouts:
        ranks.configure(dtype=dtype, zero_stage=stage, tokens_per_micro_batch=SMALL)
        ranks.resume(source, policy)  # each reads what the one before it wrote
        source = ranks.save(tmp_path / f"{ranks.num_ranks}-{stage}")
        assert_equal(whole_state(source), written)
        assert_equal(ranks.export(tmp_path / "policy-again"), exported)
        again = ranks.update(SECOND, seed=3)
        assert again["num_steps"] == 3
        assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-3 if dtype == "float32" else 0.05, abs=1e-4)
        if dtype == "float32":
            continued = whole_state(ranks.save(tmp_path / f"{ranks.num_ranks}-{stage}-after"))
            assert_close(continued, after, 2e-5)


def test_fresh_moments_would_be_seen(two: Ranks, one: Ranks, policy: Path, tmp_path: Path) -> None:
    """The control of the test above: the same weights without the optimizer's state go elsewhere."""
    two.configure(zero_stage=2)
    two.load(policy)
    two.update(FIRST, seed=1)
    two.export(tmp_path / "policy")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "policy" / name).write_bytes((policy / name).read_bytes())
    two.update(SECOND, seed=3)
    after = two.export(tmp_path / "after")
    one.configure(zero_stage=1)
    one.load(tmp_path / "policy")
    one.update(SECOND, seed=3)
    found = one.export(tmp_path / "found")
    assert max(float((found[name] - after[name]).abs().max()) for name in after) > 1e-3


def test_four_ranks_read_what_two_wrote(two: Ranks, policy: Path, tmp_path: Path) -> None:
    two.configure(zero_stage=3)
    two.load(policy)
    two.update(FIRST, seed=1)
    source = two.save(tmp_path / "written")
    scratch = tmp_path / "four"
    scratch.mkdir()
    with started(4, scratch) as four:
        for stage, written in ((3, "2 ranks at ZeRO 3"), (1, "4 ranks at ZeRO 3")):
            four.configure(zero_stage=stage)
            assert f"written by {written}" in four.resume(source, policy)
            assert_equal(whole_state(four.save(tmp_path / f"four-{stage}")), whole_state(source))
            source = tmp_path / f"four-{stage}"


def trained(ranks: Ranks, policy: Path, folder: Path, **settings: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Metrics and optimizer state after two updates of several micro-batches each."""
    ranks.configure(tokens_per_micro_batch=SMALL, **settings)
    ranks.load(policy)
    ranks.update(FIRST, seed=1)
    metrics = ranks.update(SECOND, seed=2)
    return metrics, whole_state(ranks.save(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_changes_no_result(
    dtype: str, stage: int, one: Ranks, two: Ranks, policy: Path, tmp_path: Path
) -> None:
    expected, state = trained(two, policy, tmp_path / "plain", zero_stage=stage, dtype=dtype)
    offload = {"offload_optimizer": True, "offload_parameters": stage == 3}
    found, offloaded = trained(two, policy, tmp_path / "offloaded", zero_stage=stage, dtype=dtype, **offload)
    exact = dtype == "float32"
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6 if exact else 0.02)
    assert_close(offloaded, state, 1e-6 if exact else 2e-3)
    one.configure(zero_stage=0, dtype=dtype)
    one.resume(tmp_path / "offloaded", policy)  # an offloaded state is a state like any other
    assert_equal(whole_state(one.save(tmp_path / "back")), offloaded)
    two.configure(zero_stage=stage, dtype=dtype, **offload)
    two.resume(tmp_path / "plain", policy)
    assert_equal(whole_state(two.save(tmp_path / "forth")), state)


@pytest.mark.parametrize(
    "settings", [{"zero_stage": 1}, {"zero_stage": 3}, {"zero_stage": 2, "lora": {"rank": 4}}], ids=str
)
def test_gradient_checkpointing_changes_no_result(
    settings: Mapping[str, Any], two: Ranks, policy: Path, tmp_path: Path
) -> None:
    expected, state = trained(two, policy, tmp_path / "plain", **settings)
    found, recomputed = trained(two, policy, tmp_path / "recomputed", gradient_checkpointing=True, **settings)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert_close(recomputed, state, 1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_keeps_float32_master_weights(stage: int, two: Ranks, policy: Path, tmp_path: Path) -> None:
    """Steps far below bfloat16's resolution add up, in the masters and at last in what is published."""
    from safetensors.torch import load_file

    start = load_file(policy / "model.safetensors")
    two.configure(dtype="bfloat16", zero_stage=stage, learning_rate=2e-5)
    two.load(policy)
    for seed in range(8):
        two.update(FIRST, seed)
    masters = whole_state(two.save(tmp_path / "checkpoint"))
    published = two.export(tmp_path / "policy")
    moved = rounded_away = 0
    for name, tensor in published.items():
        assert tensor.dtype == torch.bfloat16
        master = masters[f"weight/{name}"].view(tensor.shape)
        assert torch.equal(master.bfloat16(), tensor)
        moved += int((master != start[name].bfloat16().float()).sum())
        rounded_away += int((master != tensor.float()).sum())
    assert rounded_away > 0.5 * moved > 100
