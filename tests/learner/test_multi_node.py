"""Ranks started by DeepSpeed's launcher from a hostfile. All hosts are this machine; pdsh is a stand-in that runs the
hosts' commands here."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from posttrain_core.config import AlgorithmConfig, DeepSpeedLearnerConfig
from posttrain_core.errors import ConfigError, LearnerFault
from posttrain_core.learner import connection
from posttrain_core.learner.connection import Listener, connect
from posttrain_core.learner.deepspeed_learner import DeepSpeedLearner
from posttrain_core.learner.launch import HostsLaunch
from tests.learner.llama import make_samples

pytest.importorskip("deepspeed")

PDSH = f"""#!{sys.executable}
import subprocess, sys
at = sys.argv.index("-w")
hosts, command = sys.argv[at + 1].split(","), " ".join(sys.argv[at + 2 :])
running = [subprocess.Popen(["sh", "-c", command.replace("%n", str(n))]) for n in range(len(hosts))]
sys.exit(max(process.wait() for process in running))
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DeepSpeedLearner]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "bin").mkdir()
    pdsh = tmp_path / "bin/pdsh"
    pdsh.write_text(PDSH)
    pdsh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{pdsh.parent}{os.pathsep}{os.environ['PATH']}")

    def maker(hosts: str, name: str) -> DeepSpeedLearner:
        hostfile = tmp_path / f"hostfile-{name}"
        hostfile.write_text(hosts)
        config = DeepSpeedLearnerConfig(
            num_ranks=2, zero_stage=2, threads_per_rank=1, hostfile=str(hostfile) if hosts else ""
        )
        return DeepSpeedLearner(config, AlgorithmConfig(), "float32", 8, tmp_path / f"scratch-{name}")

    return maker


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.05)


def test_a_hostfile_gives_the_same_results_as_local_ranks(
    make: Callable[..., DeepSpeedLearner], policy: Path, tmp_path: Path
) -> None:
    weights = []
    for name, hosts in (
        ("local", ""),
        ("one", "localhost slots=2\n"),
        ("two", "localhost slots=1\n127.0.0.1 slots=1\n"),
    ):
        with closing(make(hosts, name)) as learner:
            learner.load_weights(policy)
            learner.update(make_samples(), seed=1)
            learner.export_policy(tmp_path / name)
            weights.append((tmp_path / name / "model.safetensors").read_bytes())
            pids = learner.pids
            assert len(pids) == 2
            if name == "two":
                os.kill(pids[1], signal.SIGKILL)
                with pytest.raises(LearnerFault, match=r"learner rank [01] on .* hung up"):
                    learner.update(make_samples(), seed=2)
        wait_for_end(pids)
        assert not list((tmp_path / f"scratch-{name}").glob("group-*"))
    assert weights[0] == weights[1] == weights[2]


PARENT = """
import sys
from pathlib import Path
from posttrain_core.config import AlgorithmConfig, DeepSpeedLearnerConfig
from posttrain_core.learner.deepspeed_learner import DeepSpeedLearner
from posttrain_core.learner.launch import HostsLaunch
from tests.learner.llama import make_samples

config = DeepSpeedLearnerConfig(threads_per_rank=1, epochs=10_000, hostfile=sys.argv[3])
learner = DeepSpeedLearner(config, AlgorithmConfig(), "float32", 8, Path(sys.argv[2]))
learner.load_weights(Path(sys.argv[1]))
print(*learner.pids, flush=True)
learner.update(make_samples(), seed=0)
"""


def test_nothing_survives_a_parent_that_is_killed(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    arguments = [sys.executable, "-c", PARENT, str(policy), str(tmp_path / "scratch"), str(tmp_path / "hosts")]
    with subprocess.Popen(arguments, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        ranks = [int(word) for word in parent.stdout.readline().split()]
        started = [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit() and str(tmp_path / "scratch").encode() in command_of(folder)
        ]
        assert set(ranks) < set(started)  # the launcher is among them
        parent.kill()
    wait_for_end(started)


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_slots_and_ranks_must_agree(make: Callable[..., DeepSpeedLearner]) -> None:
    with pytest.raises(ConfigError, match=r"has 3 slots, learner\.num_ranks is 2: make them equal"):
        make("# two machines\na slots=1\nb slots=2\n", "three").start()
    with pytest.raises(ConfigError, match="HOST slots=N"):
        make("a b c\n", "wrong").start()


def test_a_launcher_that_cannot_start_the_ranks_is_quoted(make: Callable[..., DeepSpeedLearner], policy: Path) -> None:
    learner = make("localhost slots=1\n127.0.0.1 slots=1\n", "broken")
    for folder in os.environ["PATH"].split(os.pathsep)[:1]:
        (Path(folder) / "pdsh").write_text("#!/bin/sh\necho no route to host >&2; exit 255\n")
    with pytest.raises(LearnerFault, match=r"(?s)0 of 2 learner ranks started.*no route to host"):
        learner.load_weights(policy)


def test_a_rank_needs_the_token_from_the_shared_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with closing(Listener(tmp_path / "here", ["localhost"])) as listener:
        token = tmp_path / "here" / connection.TOKEN_FILE
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        with pytest.raises(LearnerFault, match="all hosts must mount this folder"):
            connect(listener.address, tmp_path / "elsewhere", rank=1)
        assert listener.accept(5.0) is None
        assert "all hosts must mount this folder" in listener.refused
        (tmp_path / "elsewhere" / connection.TOKEN_FILE).write_text("guessed")
        connect(listener.address, tmp_path / "elsewhere", rank=1).close()
        assert listener.accept(5.0) is None
        assert "wrong token" in listener.refused

        lines = []
        thread = threading.Thread(target=lambda: lines.append(connect(listener.address, tmp_path / "here", rank=1)))
        thread.start()
        found = listener.accept(5.0)
        thread.join()
        assert found is not None
        hello, line = found
        assert (hello["rank"], hello["pid"]) == (1, os.getpid())
        connection.send(line, {"call": "x"})
        assert connection.receive(lines[0]) == {"call": "x"}
        lines[0].close()
        with pytest.raises(EOFError):
            connection.receive(line)
        line.close()
    assert not token.exists()


@pytest.mark.parametrize(
    ("hosts", "program", "why"),
    [
        ("localhost slots=2\n", "/no/such/python", "cannot start the launcher.*/no/such/python"),
        ("nowhere.invalid slots=2\n", sys.executable, "'nowhere.invalid' cannot be reached"),
    ],
)
def test_a_launch_that_fails_leaves_nothing_behind(
    hosts: str, program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostfile").write_text(hosts)
    (tmp_path / "scratch").mkdir()
    config = DeepSpeedLearnerConfig(num_ranks=2, hostfile=str(tmp_path / "hostfile"))
    monkeypatch.setattr(sys, "executable", program)
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(LearnerFault, match=why):
        HostsLaunch(config, tmp_path / "scratch")
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert not list((tmp_path / "scratch").glob("group-*"))
