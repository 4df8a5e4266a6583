"""SIGKILL at every stage boundary and at random instants; the resumed run equals the undisturbed one bit for bit."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from posttrain_core.config import RunConfig
from tests.crash.harness import computed, finish, policy_digests, run_to_end, semantic_state

STAGES = ("plan", "generate", "execute", "verify", "update", "publish")
# In the order in which a run comes to them.
BOUNDARIES = [(f"r/manifests/iteration=00001/{stage}.json", when) for stage in STAGES for when in ("before", "after")]
EVALUATION = [(f"r/eval/manifests/iteration=00002/{stage}.json", "before") for stage in STAGES[:4]]
INSIDE = [
    (f"r/{place}", "after")
    for place in (
        "plan/iteration=00002",
        "rollouts/iteration=00002",
        "executions/iteration=00002",
        "verdicts/.*/iteration=00002",
        "samples/iteration=00002",
        "policies/version=00003",
        "checkpoints/iteration=00003",
        "retired/policies",
    )
]


# With this seed some of them solve a problem in each of the iterations 0 to 3, so that each has something to learn.
SEED = 51
RESPONSES = ["2-9*x", "6*x*x+1", "x*x+3", "9*x+2", ""]


def scripted(store: str | Path, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "run": "r",
        "store": str(store),
        "seed": SEED,
        "iterations": 4,
        "domains": {"program": {"type": "program"}},
        "plan": {"problems_per_iteration": 6, "group_size": 4, "rollouts_per_shard": 12},
        "eval": {"every": 2, "num_problems": 6, "samples_per_problem": 2},
        "sampler": {"type": "scripted", "responses": RESPONSES},
        "learner": {"type": "numpy"},
        "checkpoint": {"every": 2, "keep_last": 1},
    }
    return RunConfig.model_validate(settings | changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("undisturbed")
    run_to_end(scripted(root), root / "log")
    work = Counter(computed(root))
    assert max(work.values()) == 1
    assert len(work) >= 4 * (3 + 2 * 3)
    assert len(set(policy_digests(root))) == 1 + 4, "an iteration that learns nothing proves nothing"
    return semantic_state(root)


@pytest.mark.parametrize("points", [BOUNDARIES, EVALUATION + INSIDE], ids=["boundaries", "inside"])
def test_killed_at_named_writes(points: list[tuple[str, str]], tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """Killed at each point in turn, resumed each time, then run to the end."""
    finish(scripted(tmp_path), tmp_path, points)
    assert semantic_state(tmp_path) == undisturbed
    assert "replay" in {stage for _, stage, _ in computed(tmp_path)}, "no learner was brought up again from samples"


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_instants(seed: int, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """Three kills at random writes, then three at random times, which may find the run at its end."""
    random, config = Random(seed), scripted(tmp_path)
    writes = [(".", random.choice(("before", "after")), str(random.randint(2, 9))) for _ in range(3)]
    finish(config, tmp_path, writes, [random.uniform(0.3, 2.5) for _ in range(3)])
    assert semantic_state(tmp_path) == undisturbed
