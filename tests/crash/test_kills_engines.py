"""The same with the real engines: transformers samples, DeepSpeed updates, namespaces execute."""

from pathlib import Path
from random import Random

import pytest

from posttrain_core.config import RunConfig
from posttrain_core.learner.tiny import make_tiny_llama
from tests.crash.harness import finish, run_to_end, semantic_state

STAGES = ("plan", "generate", "execute", "verify", "update", "publish")
NAMED = [
    (r"r/demonstrations", "after"),
    (r"r/manifests/start/publish.json", "before"),
    *((f"r/manifests/iteration=00000/{stage}.json", when) for stage in STAGES for when in ("before", "after")),
    (r"r/checkpoints/iteration=00001", "after"),
]
NUM_RANDOM = 6


def real(store: Path, model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": "r",
            "store": str(store),
            "iterations": 3,
            "model": {"path": str(model)},
            "sft": {"num_demonstrations": 256, "batch_size": 64, "warmup_steps": 2},
            "domains": {"program": {"type": "program", "instruction": ""}},
            "plan": {"problems_per_iteration": 4, "group_size": 4, "rollouts_per_shard": 8, "max_new_tokens": 12},
            "eval": {"every": 2, "num_problems": 4, "samples_per_problem": 2},
            "sampler": {"type": "inprocess", "num_threads": 1},
            "learner": {"type": "deepspeed", "threads_per_rank": 1, "learning_rate": 1e-3},
            "checkpoint": {"every": 2, "keep_last": 1},
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_llama(folder, seed=0, hidden_size=48, num_layers=2, num_heads=2, context_length=64)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, str]:
    root = tmp_path_factory.mktemp("undisturbed")
    run_to_end(real(root, model), root / "log")
    return semantic_state(root)


def test_killed_at_named_writes(tmp_path: Path, model: Path, undisturbed: dict[str, str]) -> None:
    finish(real(tmp_path, model), tmp_path, NAMED)
    assert semantic_state(tmp_path) == undisturbed


def test_killed_at_random_writes(tmp_path: Path, model: Path, undisturbed: dict[str, str]) -> None:
    random = Random(0)
    points = [(".", random.choice(("before", "after")), str(random.randint(2, 9))) for _ in range(NUM_RANDOM)]
    finish(real(tmp_path, model), tmp_path, points)
    assert semantic_state(tmp_path) == undisturbed
