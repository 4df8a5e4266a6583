"""The DeepSpeed learner with real rank processes: determinism, resume, ZeRO stages, death. Few starts, many checks."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain_core.config import AlgorithmConfig, DeepSpeedLearnerConfig, KlConfig, RunConfig, SftConfig
from posttrain_core.errors import ConfigError, LearnerFault, PolicyMismatch
from posttrain_core.learner.deepspeed_learner import DeepSpeedLearner
from posttrain_core.learner.factory import make_learner
from posttrain_core.learner.protocol import Demonstration
from posttrain_core.records import Message, Sample
from tests.learner.llama import make_samples

pytest.importorskip("deepspeed")

FIRST, SECOND = make_samples(seed=1), make_samples(seed=2)
Maker = Callable[..., DeepSpeedLearner]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Maker]:
    """Makes started learners and closes them all at the end."""
    made: list[DeepSpeedLearner] = []

    def maker(algorithm: AlgorithmConfig | None = None, dtype: str = "float32", **settings: int) -> DeepSpeedLearner:
        config = DeepSpeedLearnerConfig.model_validate({"threads_per_rank": 1, "learning_rate": 1e-3, **settings})
        scratch = tmp_path_factory.mktemp("learner")
        made.append(DeepSpeedLearner(config, algorithm or AlgorithmConfig(), dtype, 8, scratch))
        made[-1].start()
        return made[-1]

    yield maker
    for learner in made:
        learner.close()


@pytest.fixture(scope="module")
def single(make: Maker) -> DeepSpeedLearner:
    return make(zero_stage=1)


@pytest.fixture(scope="module")
def other(make: Maker, single: DeepSpeedLearner) -> DeepSpeedLearner:
    """A second process like the first; killed by the last test that uses it."""
    return make(zero_stage=1)


def digest(learner: DeepSpeedLearner, folder: Path) -> str:
    learner.export_policy(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def weights(folder: Path) -> dict[str, "object"]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def sampled_by(learner: DeepSpeedLearner, samples: Sequence[Sample], shift: float = 0.0) -> list[Sample]:
    """The samples as if the held policy had sampled them; `shift` is a sampler's error of each log-probability."""
    results = []
    for sample in samples:
        begin = sample.loss_mask.index(1)
        values = learner.score(sample.input_ids[:begin], sample.input_ids[begin:], sample.temperature)
        logprobs = (0.0,) * begin + tuple(value + shift for value in values)
        results.append(replace(sample, sampler_logprobs=logprobs))
    return results


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_same_calls_same_bytes_also_through_a_checkpoint_in_another_process(
    single: DeepSpeedLearner, other: DeepSpeedLearner, policy: Path, tmp_path: Path
) -> None:
    single.load_weights(policy)
    first = single.update(FIRST, seed=1)
    single.save_checkpoint(tmp_path / "checkpoint")
    second = single.update(SECOND, seed=2)
    undisturbed = digest(single, tmp_path / "a")

    other.load_checkpoint(tmp_path / "checkpoint", reference=policy)
    assert other.update(SECOND, seed=2) == second
    assert digest(other, tmp_path / "b") == undisturbed

    single.load_weights(policy)
    assert single.update(FIRST, seed=1) == first
    assert single.update(SECOND, seed=2) == second
    assert digest(single, tmp_path / "c") == undisturbed
    assert second["num_steps"] == 2


def test_weights_alone_do_not_resume(single: DeepSpeedLearner, policy: Path, tmp_path: Path) -> None:
    single.load_weights(policy)
    single.update(FIRST, seed=1)
    single.export_policy(tmp_path / "v1")
    single.update(SECOND, seed=2)
    continued = digest(single, tmp_path / "a")
    single.load_weights(tmp_path / "v1")
    assert single.update(SECOND, seed=2)["num_steps"] == 1
    assert digest(single, tmp_path / "b") != continued


def test_an_exported_policy_is_complete(single: DeepSpeedLearner, policy: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    single.load_weights(policy)
    single.update(FIRST, seed=1)
    single.export_policy(tmp_path / "v1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    import torch

    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([[1, 5, 6, 9]])).logits[0], dim=1)
    assert single.score([1, 5, 6], [9], 1.0) == pytest.approx([float(logprobs[2, 9])], abs=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "v1")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False)
    assert prompt == "<bos>1+1"
    assert json.loads((tmp_path / "v1" / "config.json").read_text())["dtype"] == "float32"


def test_an_update_moves_towards_what_paid(single: DeepSpeedLearner, policy: Path) -> None:
    single.load_weights(policy)
    best = max(FIRST, key=lambda sample: sample.advantage)
    begin = best.loss_mask.index(1)
    prompt, response = best.input_ids[:begin], best.input_ids[begin:]
    before = sum(single.score(prompt, response, 1.0))
    for seed in range(3):
        single.update(FIRST, seed)
    assert sum(single.score(prompt, response, 1.0)) > before


def test_supervised_training_learns_and_leaves_a_fresh_optimizer(single: DeepSpeedLearner, policy: Path) -> None:
    demonstrations = [Demonstration((Message("user", f"{n}+1"),), str(n + 1)) for n in range(8)]
    config = SftConfig(epochs=120, batch_size=8, learning_rate=1e-2, warmup_steps=4)
    single.load_weights(policy)
    metrics = single.sft(demonstrations, config, seed=0)
    assert metrics["loss"] < 0.2 < metrics["first_loss"]
    # <bos> 3 + 1 = is answered 4 <eos>
    assert sum(single.score([1, 6, 13, 4, 18], [7, 2], 1.0)) > -0.5
    assert single.update(sampled_by(single, FIRST), seed=1)["num_steps"] == 1
    with pytest.raises(LearnerFault, match="load_weights"):
        single.sft(demonstrations, config, seed=0)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_two_ranks_agree_with_one(
    zero_stage: int, make: Maker, single: DeepSpeedLearner, policy: Path, tmp_path: Path
) -> None:
    pair = make(num_ranks=2, zero_stage=zero_stage)
    results: list[tuple[Mapping[str, float], Mapping[str, object]]] = []
    for learner, name in ((single, "one"), (pair, "two")):
        if learner is single:
            single.start()
        learner.load_weights(policy)
        learner.update(FIRST, seed=1)
        learner.save_checkpoint(tmp_path / name)
        metrics = learner.update(SECOND, seed=2)
        learner.export_policy(tmp_path / f"{name}-weights")
        results.append((metrics, weights(tmp_path / f"{name}-weights")))
    (one, one_weights), (two, two_weights) = results
    for name in set(one) - {"padding_share"}:
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert one_weights.keys() == two_weights.keys()
    import torch

    for name, tensor in one_weights.items():
        torch.testing.assert_close(two_weights[name], tensor, rtol=0, atol=5e-5)

    assert pair.load_checkpoint(tmp_path / "two", reference=policy) == ""
    assert pair.update(SECOND, seed=2) == two
    pair.export_policy(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        tmp_path / "two-weights/model.safetensors"
    ).read_bytes()
    pids = pair.pids
    if zero_stage == 2:
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(LearnerFault, match="learner rank 1 was killed by signal 9"):
            pair.update(FIRST, seed=1)
    else:
        note = pair.load_checkpoint(tmp_path / "one", reference=policy)
        assert "written by 1 rank at ZeRO 1 and goes on with 2 ranks at ZeRO 3" in note
        assert pair.update(SECOND, seed=2)["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-5)
        pair.close()
    assert pair.pids == []
    wait_for_end(pids)


def test_the_references_values_are_made_once_and_a_mismatch_stops_all_ranks(
    make: Maker, policy: Path, tmp_path: Path
) -> None:
    pair = make(AlgorithmConfig(kl=KlConfig(coefficient=0.1)), num_ranks=2, zero_stage=2)
    shutil.copytree(policy, tmp_path / "reference")
    pair.load_weights(policy)
    pair.update(with_reference(pair, FIRST), seed=1)
    pair.save_checkpoint(tmp_path / "checkpoint")
    second = with_reference(pair, SECOND)
    for sample in second:
        scored = pair.score(sample.input_ids[:1], sample.input_ids[1:], 1.0)
        assert len(sample.reference_logprobs) == len(sample.loss_mask)
        assert list(sample.reference_logprobs[1:]) != pytest.approx(scored, abs=1e-6), "the held policy has moved on"
    metrics = pair.update(second, seed=2)
    assert metrics["kl"] > 0
    undisturbed = digest(pair, tmp_path / "a")
    with pytest.raises(LearnerFault, match="no reference log-probabilities"):
        pair.update(FIRST, seed=1)

    pair.load_checkpoint(tmp_path / "checkpoint", reference=tmp_path / "reference")
    shutil.rmtree(tmp_path / "reference")  # a replay needs it no more
    assert pair.update(second, seed=2) == metrics
    assert digest(pair, tmp_path / "b") == undisturbed

    pids = pair.pids
    shifted = sampled_by(pair, second, shift=-0.7)
    with pytest.raises(PolicyMismatch, match=r"logprob_difference_mean is 0\.7, .*max_mean_difference is 0\.3"):
        pair.update(shifted, seed=3)
    assert pair.pids == []
    wait_for_end(pids)


def with_reference(learner: DeepSpeedLearner, samples: Sequence[Sample]) -> list[Sample]:
    rows = learner.reference_logprobs(samples)
    return [replace(sample, reference_logprobs=row) for sample, row in zip(samples, rows, strict=True)]


def test_a_killed_rank_is_named_and_the_next_load_starts_anew(
    other: DeepSpeedLearner, policy: Path, tmp_path: Path
) -> None:
    other.load_weights(policy)
    (pid,) = other.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LearnerFault, match="learner rank 0 was killed by signal 9"):
        other.update(FIRST, seed=1)
    wait_for_end([pid])
    with pytest.raises(LearnerFault, match="holds no policy"):
        other.update(FIRST, seed=1)
    with pytest.raises(LearnerFault, match="not a Hugging Face policy folder"):
        other.load_weights(tmp_path / "nothing")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(LearnerFault, match="cannot load a causal LM"):
        other.load_weights(broken)
    assert other.pids == []


PARENT = """
import sys
from pathlib import Path
from posttrain_core.config import AlgorithmConfig, DeepSpeedLearnerConfig
from posttrain_core.learner.deepspeed_learner import DeepSpeedLearner
from tests.learner.llama import make_samples

config = DeepSpeedLearnerConfig(threads_per_rank=1, epochs=1000)
report = lambda done, total: print("step", done, flush=True)
learner = DeepSpeedLearner(config, AlgorithmConfig(), "float32", 8, Path(sys.argv[2]), report)
learner.start()
print(*learner.pids, flush=True)
learner.load_weights(Path(sys.argv[1]))
learner.update(make_samples(), seed=0)
"""


@pytest.mark.parametrize("moment", ["importing", "computing"])
def test_ranks_end_with_a_parent_that_is_killed(moment: str, policy: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    arguments = [sys.executable, "-c", PARENT, str(policy), str(tmp_path)]
    with subprocess.Popen(arguments, cwd=root, stdout=subprocess.PIPE, process_group=0) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert pids
        assert all(alive(pid) for pid in pids)
        if moment == "computing":
            assert parent.stdout.readline().startswith(b"step")
        parent.kill()
    wait_for_end(pids)


def test_a_setting_without_effect_is_refused_before_anything_starts(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(preset="grpo", normalizer=7)
    with pytest.raises(ConfigError, match="normalizer"):
        DeepSpeedLearner(DeepSpeedLearnerConfig(), algorithm, "float32", 8, tmp_path)


def test_the_parent_needs_no_torch() -> None:
    code = "import sys, posttrain_core.learner.deepspeed_learner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_what_the_system_refuses_is_a_fault_of_the_learner(single: DeepSpeedLearner, policy: Path) -> None:
    single.load_weights(policy)
    with pytest.raises(LearnerFault, match="cannot write in /proc/nowhere"):
        single.export_policy(Path("/proc/nowhere"))
    assert single.update(FIRST, seed=1)["num_steps"] == 1


def test_close_leaves_no_process_and_no_descriptor(tmp_path: Path) -> None:
    learner = make_learner(
        RunConfig.model_validate({"model": {"path": "x"}, "domains": {"d": {"type": "program"}}}), tmp_path
    )
    assert isinstance(learner, DeepSpeedLearner)
    before = len(list(Path("/proc/self/fd").iterdir()))
    learner.start()
    pids = learner.pids
    learner.close()
    learner.close()
    wait_for_end(pids)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".log"]
