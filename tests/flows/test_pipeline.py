"""The order of stages: shards overlap, blocks end at evaluations, an interrupted or server-less run goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows import pipeline
from flows.scratch import scratch_folder
from posttrain_core.config import RunConfig
from posttrain_core.errors import StoreError
from posttrain_core.inspect.catalogue import open_run
from posttrain_core.sampling.protocol import Completion, OnDone, SampleRequest
from posttrain_core.sampling.scripted import ScriptedSampler
from posttrain_core.sandbox.embedded import EmbeddedSandbox
from posttrain_core.sandbox.protocol import Limits, ProgramRequest, ProgramResult
from posttrain_core.store.memory import MemoryStore
from tasks.runner import ThreadRunner
from tests.crash.test_kills import scripted

BIN = Path(sys.executable).parent


class CountingSampler(ScriptedSampler):
    """Announces its second shard."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config.sampler)  # type: ignore[arg-type]
        self.second = threading.Event()
        self._calls = 0

    def sample(self, requests: Sequence[SampleRequest], on_done: OnDone | None = None) -> list[Completion]:
        self._calls += 1
        if self._calls == 2:
            self.second.set()
        return super().sample(requests)


class WaitingSandbox(EmbeddedSandbox):
    """Runs nothing before the sampler is at its second shard."""

    second: threading.Event

    def run_programs(self, requests: Sequence[ProgramRequest], limits: Limits) -> list[ProgramResult]:
        assert self.second.wait(60), "the second shard was not generated while the first one was executed"
        return super().run_programs(requests, limits)


def test_a_shard_executes_while_the_next_one_generates(tmp_path: Path) -> None:
    config = scripted(tmp_path, iterations=1, eval={"every": 1, "num_problems": 1, "samples_per_problem": 1})
    with (
        scratch_folder() as scratch,
        pipeline.open_services(config, scratch) as services,
        ThreadRunner(config.prefect) as runner,
    ):
        pipeline.begin(services, runner)
        sampler, sandbox = CountingSampler(config), WaitingSandbox(1)
        sandbox.second = sampler.second
        services.sampler.close()
        services.sampler, held = sampler, services.sandbox
        services.sandbox = sandbox
        pipeline.iterate(services, runner, 0)
        sandbox.close()
        services.sandbox = held
    assert open_run(str(tmp_path), "r").policy_versions == [0, 1]


def test_blocks_end_at_evaluations_and_stay_short() -> None:
    config = scripted(Path("/nowhere"), iterations=7, eval={"every": 3}, prefect={"iterations_per_flow_run": 2})
    assert pipeline.blocks(config) == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    assert pipeline.blocks(scripted(Path("/nowhere"), iterations=0)) == []


def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(MemoryStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            self.put(key, data)
            return True

    config = scripted(tmp_path)
    monkeypatch.setattr(pipeline, "open_store", lambda url: Careless())
    with pytest.raises(StoreError, match="put-if-absent overwrote"):
        with pipeline.open_services(config, tmp_path):
            pass


def test_interrupted_run_says_how_to_go_on_and_does(tmp_path: Path) -> None:
    config = scripted(tmp_path / "store", iterations=2000, eval={"every": 5000, "num_problems": 2})
    (tmp_path / "config.yaml").write_text(config.model_dump_json())
    process = subprocess.Popen(
        [BIN / "posttrain", "run", tmp_path / "config.yaml", "--no-prefect"], stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(tmp_path / "store/runs/r/manifests/iteration=00001/publish.json", process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    command = f"posttrain resume r --store {tmp_path / 'store'}"
    assert command in said  # behind the folder of the program, where the shell would not find it
    published = open_run(str(tmp_path / "store"), "r").policy_versions
    resume = [BIN / "posttrain", *command.split()[1:], "--no-prefect", "--set", f"iterations={published[-1] + 1}"]
    subprocess.run(resume, check=True, capture_output=True, timeout=60)
    assert open_run(str(tmp_path / "store"), "r").policy_versions[-1] == published[-1] + 1


def test_a_run_outlives_its_prefect_server(tmp_path: Path) -> None:
    """The server is killed in the middle and its database removed: the run ends as it should."""
    config = scripted(tmp_path / "store", iterations=30, eval={"every": 5000, "num_problems": 2})
    (tmp_path / "config.yaml").write_text(config.model_dump_json())
    home = tmp_path / "prefect"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    process = subprocess.Popen(
        [BIN / "posttrain", "run", tmp_path / "config.yaml"],
        stderr=subprocess.PIPE,
        text=True,
        env=clean | {"POSTTRAIN_PREFECT_HOME": str(home)},
    )
    try:
        wait_for(tmp_path / "store/runs/r/manifests/iteration=00003/publish.json", process)
        os.kill(int((home / "server.json").read_text().partition('"pid": ')[2].partition(",")[0]), signal.SIGKILL)
        (home / "prefect.db").unlink()
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "without Prefect" in said
    assert open_run(str(tmp_path / "store"), "r").policy_versions[-1] == 30


def wait_for(path: Path, process: "subprocess.Popen[str]", timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
