"""Adapters: what is trained, published, stored and compared with."""

import warnings
from contextlib import closing
from pathlib import Path

import pytest

from posttrain_core.config import (
    AlgorithmConfig,
    DeepSpeedLearnerConfig,
    InProcessSamplerConfig,
    KlConfig,
    LoraConfig,
    SftConfig,
)
from posttrain_core.errors import LearnerFault
from posttrain_core.learner.deepspeed_learner import DeepSpeedLearner
from posttrain_core.learner.protocol import Demonstration
from posttrain_core.manifest import commit_folder, fetch_folder
from posttrain_core.records import Message
from posttrain_core.sampling.protocol import Probe
from posttrain_core.store.memory import MemoryStore
from tests.learner.llama import make_samples
from tests.learner.rank_group import Ranks, whole_state

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("peft")

FIRST, SECOND = make_samples(seed=1), make_samples(seed=2)
LORA = LoraConfig(rank=4, alpha=8.0)
ADAPTER = "adapter_model.safetensors"
KL = AlgorithmConfig(kl=KlConfig(coefficient=0.5))


def logits(model: object) -> "torch.Tensor":
    with torch.no_grad():
        return model(torch.tensor([[1, 5, 6, 9, 4, 18]])).logits  # type: ignore[operator]


def test_the_published_adapter_and_the_merged_weights_are_the_same_policy(
    one: Ranks, two: Ranks, policy: Path, tmp_path: Path
) -> None:
    import peft
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base_weights = load_file(policy / "model.safetensors")
    exported = {}
    for name, ranks, stage in (("a", one, 0), ("b", two, 1), ("c", two, 2), ("d", two, 3), ("again", two, 3)):
        ranks.configure(lora=LORA.model_dump(), zero_stage=stage)
        ranks.load(policy)
        ranks.update(FIRST, seed=1)
        ranks.update(SECOND, seed=2)
        exported[name] = ranks.export(tmp_path / name)
        assert exported[name].keys() == base_weights.keys()
        for weight, tensor in exported["a"].items():
            torch.testing.assert_close(exported[name][weight], tensor, rtol=0, atol=1e-4)
    changed = {name for name, tensor in base_weights.items() if not torch.equal(tensor, exported["a"][name])}
    assert changed == {name for name in base_weights if "_proj" in name}  # not the embedding, not the norms

    model = AutoModelForCausalLM.from_pretrained(policy)
    untrained = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for something by its old name
        adapted = logits(peft.PeftModel.from_pretrained(model, tmp_path / "d/adapter"))
    merged = AutoModelForCausalLM.from_pretrained(policy)
    merged.load_state_dict(exported["d"], strict=False)
    torch.testing.assert_close(adapted, logits(merged), rtol=0, atol=1e-5)
    assert float((adapted - untrained).abs().max()) > 1e-2
    for file in ("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "d" / file).read_bytes()
    assert str(policy) not in (tmp_path / "d/adapter/adapter_config.json").read_text()


def test_a_checkpoint_holds_the_adapters_only_and_resumes_under_another_layout(
    one: Ranks, two: Ranks, policy: Path, tmp_path: Path
) -> None:
    two.configure(lora=LORA.model_dump(), zero_stage=3)
    two.load(policy)
    two.update(FIRST, seed=1)
    written = whole_state(two.save(tmp_path / "written"))
    assert written
    assert all(".lora_" in name for name in written)
    exported = two.export(tmp_path / "then")
    two.update(SECOND, seed=2)
    after = whole_state(two.save(tmp_path / "after"))
    one.configure(lora=LORA.model_dump(), zero_stage=0)
    assert "2 ranks at ZeRO 3 and goes on with 1 rank at ZeRO 0" in one.resume(tmp_path / "written", policy)
    for name, tensor in one.export(tmp_path / "now").items():
        assert torch.equal(tensor, exported[name])
    one.update(SECOND, seed=2)
    for name, tensor in whole_state(one.save(tmp_path / "after-one")).items():
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_reference_is_the_policy_without_its_adapters(stage: int, two: Ranks, policy: Path, tmp_path: Path) -> None:
    """Its log-probabilities stay those of version 0, and asking for them changes nothing in the training."""
    settings = {"lora": LORA.model_dump(), "zero_stage": stage}
    two.configure(**settings, algorithm=KL)
    two.load(policy)
    reference = two.reference_logprobs(FIRST)
    assert two.update(reference, seed=1)["kl"] == pytest.approx(0.0, abs=1e-9)
    again = two.reference_logprobs(FIRST)
    for row, other in zip(reference, again, strict=True):
        assert other.reference_logprobs == pytest.approx(row.reference_logprobs, abs=1e-6)
    checkpoint = two.save(tmp_path / "checkpoint")
    third = two.update(again, seed=3)
    assert third["kl"] > 1e-5
    two.configure(**settings)
    two.resume(checkpoint, policy)
    alone = two.update(FIRST, seed=3)
    assert "kl" not in alone
    assert alone["entropy"] == third["entropy"]


def test_bfloat16_adapters_train(one: Ranks, policy: Path, tmp_path: Path) -> None:
    one.configure(lora=LORA.model_dump(), zero_stage=2, dtype="bfloat16")
    one.load(policy)
    losses = [one.update(FIRST, seed=0)["entropy"] for _ in range(3)]
    assert len(set(losses)) == 3
    merged = one.export(tmp_path / "policy")
    assert all(tensor.dtype == torch.bfloat16 for tensor in merged.values())


def test_a_run_with_adapters_from_the_warm_start_to_the_sampler(policy: Path, tmp_path: Path) -> None:
    from posttrain_core.sampling.inprocess import InProcessSampler

    config = DeepSpeedLearnerConfig(threads_per_rank=1, lora=LORA, zero_stage=1)
    demonstrations = [Demonstration((Message("user", f"{n}+1"),), str(n + 1)) for n in range(8)]
    sft = SftConfig(epochs=30, batch_size=8, learning_rate=3e-2, warmup_steps=4)
    with closing(DeepSpeedLearner(config, AlgorithmConfig(), "float32", 8, tmp_path / "scratch")) as learner:
        learner.load_weights(policy)
        metrics = learner.sft(demonstrations, sft, seed=0)
        assert metrics["loss"] < 0.9 * metrics["first_loss"]  # the embedding and the output layer are frozen
        learned = learner.score([1, 6, 13, 4, 18], [7, 2], 1.0)
        learner.export_policy(tmp_path / "v0")
        learner.load_weights(tmp_path / "v0")
        assert learner.score([1, 6, 13, 4, 18], [7, 2], 1.0) == learned
        assert learner.update(FIRST, seed=1)["num_steps"] == 1
        learner.export_policy(tmp_path / "v1")
        probe = Probe((1, 6, 13, 4, 18), (7, 2), tuple(learner.score([1, 6, 13, 4, 18], [7, 2], 1.0)))
    store = MemoryStore()
    refs = commit_folder(store, "policy/", tmp_path / "v1", semantic=True)
    fetched = fetch_folder(store, refs, "policy/", tmp_path / "cache")
    assert {path.name for path in (fetched / "adapter").iterdir()} == {"adapter_config.json", ADAPTER}
    with closing(InProcessSampler(InProcessSamplerConfig(device="cpu"))) as sampler:
        sampler.load_policy(0, tmp_path / "v0")
        sampler.load_policy(1, fetched, [probe])  # compared with what the learner says


def test_modules_that_do_not_exist_are_named(one: Ranks, policy: Path) -> None:
    one.configure(lora=LoraConfig(target_modules=("query",)).model_dump())
    with pytest.raises(LearnerFault, match=r"learner\.lora\.target_modules.*query"):
        one.load(policy)
