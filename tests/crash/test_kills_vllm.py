"""A run with vLLM whose services are killed under it, and which is killed itself: each rollout is there exactly once.

vLLM promises no equal bits, so what is compared is what was committed: every row of the plan has its one rollout,
execution and verdict, nothing that was committed is computed again, and the run ends with all its policies.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain_core.config import RunConfig
from posttrain_core.inspect import tables
from posttrain_core.inspect.catalogue import Run, open_run
from posttrain_core.learner.tiny import make_tiny_llama
from tests.crash.harness import assert_gone, computed, descendants, launch, process_command
from tests.sampling.vllm.conftest import vllm_python

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.usefixtures("vllm_python")]
__all__ = ["vllm_python"]  # a fixture

NUM_ITERATIONS = 3
SAMPLER = "EngineCore|vllm"
RANK = "posttrain_core.learner.worker"
MANIFESTS = "runs/r/manifests/iteration="
KILLS = [
    (0, "plan", "generate", SAMPLER),
    (1, "verify", "update", RANK),
    (2, "plan", "generate", SAMPLER),
    (2, "verify", "update", RANK),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_llama(folder, seed=0, hidden_size=128, num_layers=2, num_heads=4, context_length=512)
    return folder


def served(store: Path, model: Path) -> RunConfig:
    """Random weights end their turn after 100 tokens on average, so that a shard takes seconds to generate."""
    return RunConfig.model_validate(
        {
            "run": "r",
            "store": str(store),
            "iterations": NUM_ITERATIONS,
            "model": {"path": str(model)},
            "domains": {"program": {"type": "program", "instruction": ""}},
            "plan": {"problems_per_iteration": 32, "group_size": 8, "rollouts_per_shard": 256, "max_new_tokens": 300},
            "eval": {"every": 10, "num_problems": 2, "samples_per_problem": 1},
            "sampler": {"type": "vllm"},
            "learner": {"type": "deepspeed", "num_ranks": 2, "zero_stage": 2, "threads_per_rank": 1},
            "checkpoint": {"every": 1},
        }
    )


def killed_between(process: subprocess.Popen[bytes], root: Path, begin: str, end: str, pattern: str) -> None:
    """SIGKILL to every process below the run whose command matches, once `begin` is there and `end` is not."""
    deadline = time.monotonic() + 400
    while not (root / begin).exists():
        assert process.poll() is None, (root / "log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"{begin} did not come"
        time.sleep(0.02)
    while time.monotonic() < deadline:
        found = [pid for pid, _ in descendants(process.pid) if re.search(pattern, process_command(pid))]
        if found and _is_working(found):
            break
        time.sleep(0.02)
    assert not (root / end).exists(), f"{end} came before the kill: the test's work is too short"
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # the others of a server follow the first one by themselves
            os.kill(pid, signal.SIGKILL)


def _is_working(pids: list[int]) -> bool:
    """Whether they use the CPU: their start-up is over long before in all iterations but the first."""
    before, started = _cpu_ticks(pids), time.monotonic()
    time.sleep(0.5)
    return _cpu_ticks(pids) - before > 0.3 * os.sysconf("SC_CLK_TCK") * (time.monotonic() - started)


def _cpu_ticks(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total


@pytest.fixture
def started(tmp_path: Path, model: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = launch(served(tmp_path, model), log=tmp_path / "log")
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def exactly_once(root: Path) -> None:
    run = open_run(str(root), "r")
    planned = _ids(run, "plan")
    assert len(planned) == len(set(planned)) == 256 * NUM_ITERATIONS
    for table in ("rollouts", "executions", "verdicts"):
        assert _ids(run, table) == planned, table
    assert (root / f"{MANIFESTS}{NUM_ITERATIONS - 1:05d}/publish.json").exists()
    assert not list(root.glob("runs/r/journal/**/*.parquet"))


def _ids(run: Run, table: str) -> list[str]:
    ids = tables.read(run, table, ["rollout_id"])["rollout_id"].to_pylist()
    return [rollout_id for rollout_id in ids if rollout_id.startswith("i")]


def test_services_are_killed_under_a_run(tmp_path: Path, started: subprocess.Popen[bytes]) -> None:
    """The sampler in one iteration, the learner in the next, both in the last: the same process goes on."""
    for iteration, begin, end, pattern in KILLS:
        scope = f"{MANIFESTS}{iteration:05d}"
        killed_between(started, tmp_path, f"{scope}/{begin}.json", f"{scope}/{end}.json", pattern)
    assert started.wait(600) == 0, (tmp_path / "log").read_text()[-3000:]
    finished = Counter(work for work in computed(tmp_path) if work[1] != "replay")
    assert set(finished.values()) == {1}, finished
    exactly_once(tmp_path)


def test_a_killed_run_leaves_no_server_and_goes_on(
    tmp_path: Path, model: Path, started: subprocess.Popen[bytes]
) -> None:
    """In the middle of generation; the journal has what had finished by then, and the next process takes it."""
    journal = tmp_path / "runs/r/journal"
    deadline = time.monotonic() + 400
    while not list(journal.glob("**/*.parquet")):
        assert started.poll() is None, (tmp_path / "log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = descendants(started.pid)
    assert any(re.search(SAMPLER, process_command(pid)) for pid, _ in family)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    assert_gone(family)
    resumed = launch(served(tmp_path, model), log=tmp_path / "log")
    assert resumed.wait(600) == 0, (tmp_path / "log").read_text()[-3000:]
    exactly_once(tmp_path)
    facts = [path.read_text() for path in tmp_path.glob("runs/r/telemetry/iteration=00000/generate.*.json")]
    assert any('"journalled": 0' not in fact for fact in facts), facts
