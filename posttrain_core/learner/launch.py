"""How rank processes come to be: started here, or on the hosts of a hostfile by DeepSpeed's own launcher. No torch.

Both give every rank a line to its parent (`connection`) and a folder that parent and ranks share.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from posttrain_core.config import DeepSpeedLearnerConfig
from posttrain_core.errors import ConfigError, LearnerFault
from posttrain_core.learner.connection import LOOPBACK, Listener, free_port, is_this_machine

WORKER = "posttrain_core.learner.worker"
IMPORT_ROOT = Path(__file__).parents[2]  # the ranks import the very package that started them, installed or not
LOG_TAIL_CHARACTERS = 2000
STOP_SECONDS = 5.0


@dataclass
class Rank:
    """`process` is None on other machines."""

    number: int
    connection: Connection
    pid: int
    log: Path
    host: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"learner rank {self.number}" + (f" on {self.host}" if self.host else "")


class Launch(Protocol):
    def ranks(self) -> list[Rank]:
        """All of them, in order; waits for those that are not there yet. Raises LearnerFault."""

    def pids(self) -> list[int]:
        """Of those that are there."""

    def ending(self, rank: Rank) -> str:
        """How a rank that hung up has ended."""

    def stop(self, grace: float) -> None:
        """Close all lines, which lets the ranks go; what stays after `grace` seconds is killed."""


class LocalLaunch:
    """Processes of this machine. Started when this returns; they import for some seconds."""

    def __init__(self, config: DeepSpeedLearnerConfig, scratch: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=scratch, prefix="group-"))
        self._ranks: list[Rank] = []
        try:
            for number in range(config.num_ranks):
                self._ranks.append(self._start(number, config, scratch / log_name(number)))
        except OSError as error:
            self.stop(grace=0.0)
            raise LearnerFault(f"cannot start a rank of the learner: {error}") from error

    def ranks(self) -> list[Rank]:
        return self._ranks

    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def ending(self, rank: Rank) -> str:
        assert rank.process is not None
        try:
            status = rank.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return "hung up"
        return f"was killed by signal {-status}" if status < 0 else f"exited with {status}"

    def stop(self, grace: float) -> None:
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            if rank.process is not None:
                _end(rank.process, grace, rank.process.kill)
        self._ranks = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, number: int, config: DeepSpeedLearnerConfig, log: Path) -> Rank:
        ours, theirs = Pipe()
        arguments = [f"fd:{theirs.fileno()}", str(self._folder), str(config.threads_per_rank)]
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": config.num_ranks, "LOCAL_SIZE": config.num_ranks}
        try:
            with theirs, log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", WORKER, *arguments],
                    env=_environment() | {name: str(value) for name, value in place.items()},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,  # Ctrl-C is for the parent, which then stops the ranks in order
                )
        except OSError:
            ours.close()
            raise
        return Rank(number, ours, process.pid, log, process=process)


class HostsLaunch:
    """`deepspeed --hostfile`: the ranks connect back, from this machine or others."""

    def __init__(self, config: DeepSpeedLearnerConfig, scratch: Path) -> None:
        slots = read_hostfile(Path(config.hostfile))
        if sum(slots.values()) != config.num_ranks:
            raise ConfigError(
                f"learner.hostfile {config.hostfile} has {sum(slots.values())} slots, learner.num_ranks is "
                f"{config.num_ranks}: make them equal"
            )
        self._config, self._scratch = config, scratch
        self._found: dict[int, Rank] = {}
        self._log = scratch / "launcher.log"
        with ExitStack() as undo:
            self._folder = Path(tempfile.mkdtemp(dir=scratch, prefix="group-"))
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            try:
                self._listener = Listener(self._folder, list(slots))
                undo.callback(self._listener.close)
                self._launcher = self._start(slots)
            except OSError as error:
                raise LearnerFault(f"cannot start the launcher of the learner's ranks: {error}") from error
            undo.pop_all()  # all is well: from here on `stop` does it

    def ranks(self) -> list[Rank]:
        deadline = time.monotonic() + self._config.stall_seconds
        while len(self._found) < self._config.num_ranks:
            if (found := self._listener.accept(seconds=0.5)) is not None:
                hello, line = found
                number = int(hello["rank"])
                log = self._scratch / log_name(number)
                self._found[number] = Rank(number, line, int(hello["pid"]), log, str(hello["host"]))
                deadline = time.monotonic() + self._config.stall_seconds
            elif self._launcher.poll() is not None or time.monotonic() > deadline:
                raise LearnerFault(
                    f"{len(self._found)} of {self._config.num_ranks} learner ranks started from "
                    f"{self._config.hostfile}. {self._listener.refused}\n"
                    f"The end of the launcher's log {self._log}:\n{tail(self._log)}"
                )
        return [self._found[number] for number in sorted(self._found)]

    def pids(self) -> list[int]:
        return [rank.pid for rank in self._found.values()]

    def ending(self, rank: Rank) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(STOP_SECONDS)
        return f"hung up; the end of the launcher's log {self._log}:\n{tail(self._log)}\n"

    def stop(self, grace: float) -> None:
        if not self._folder.exists():
            return
        self._listener.close()
        for rank in self._found.values():
            rank.connection.close()
        self._found = {}
        _end(self._launcher, grace, self._kill)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, slots: Mapping[str, int]) -> subprocess.Popen[bytes]:
        address, port = self._listener.address
        hostfile = str(Path(self._config.hostfile).resolve())
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", hostfile]
        command += ["--master_port", str(free_port())]
        if all(is_this_machine(host) for host in slots):  # no ssh to find out what is known
            command += ["--master_addr", LOOPBACK, "--no_ssh_check"]
        command += ["--no_local_rank", "--module", WORKER]
        command += [f"tcp:{address}:{port}", str(self._folder), str(self._config.threads_per_rank)]
        with self._log.open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=self._folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def _kill(self) -> None:
        """All that is here of the launch. What is elsewhere has lost its line and goes by itself. Told to end, the
        launcher would kill by name on all hosts, and so other runs with the same hostfile."""
        with suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)


def launch(config: DeepSpeedLearnerConfig, scratch: Path) -> Launch:
    return HostsLaunch(config, scratch) if config.hostfile else LocalLaunch(config, scratch)


def read_hostfile(path: Path) -> dict[str, int]:
    """Slots by host, from lines such as `worker-1 slots=4` (DeepSpeed's format). Raises ConfigError."""
    slots = {}
    try:
        for line in path.read_text().splitlines():
            if words := line.partition("#")[0].split():
                host, setting = words
                slots[host] = int(setting.removeprefix("slots="))
    except (OSError, ValueError) as error:
        raise ConfigError(f"learner.hostfile {path}: {error}; a line must read: HOST slots=N") from error
    return slots


def log_name(rank: int) -> str:
    return f"rank{rank}.log"


def tail(log: Path) -> str:
    with suppress(OSError):
        return log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:].strip()
    return ""


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(IMPORT_ROOT), os.environ.get("PYTHONPATH")])),
    }


def _end(process: subprocess.Popen[bytes], grace: float, kill: Callable[[], None]) -> None:
    if grace == 0.0:
        kill()
    try:
        process.wait(grace or None)
    except subprocess.TimeoutExpired:
        kill()
        process.wait()
