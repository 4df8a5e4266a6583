"""`RankGroup`: the learner's rank processes as seen by their parent. No torch here.

Each rank has a pipe for commands and one for replies. The ranks watch the command pipe and end with their parent;
when one of them ends or fails, the parent ends them all, because collectives cannot be continued without it.
"""

import json
import os
import selectors
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain_core.config import DeepSpeedLearnerConfig
from posttrain_core.errors import LearnerFault

LOG_TAIL_CHARACTERS = 2000
STOP_SECONDS = 5.0
IMPORT_ROOT = Path(__file__).parents[2]  # the ranks import the very package that started them, installed or not

Progress = Callable[[int, int], None]


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    command_fd: int
    reply_fd: int
    log: Path
    pending: bytes = field(default=b"")


class _HungUp(Exception):
    def __init__(self, rank: _Rank) -> None:
        super().__init__()
        self.rank = rank


class RankGroup:
    """Starts the ranks and returns at once; they import for some seconds while `call` can already be given.

    `scratch` exists; the ranks' logs go there.
    """

    def __init__(self, config: DeepSpeedLearnerConfig, scratch: Path) -> None:
        num_ranks = config.num_ranks
        rendezvous = scratch / f"rendezvous-{uuid.uuid4().hex}"
        threads = config.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // num_ranks)
        self._ranks: list[_Rank] = []
        self._rendezvous = rendezvous
        for number in range(num_ranks):
            self._ranks.append(_start(number, num_ranks, threads, rendezvous, scratch / f"rank{number}.log"))

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def call(self, command: Mapping[str, Any], progress: Progress | None = None) -> Any:
        """Give every rank the command and wait for all; returns rank 0's result. Raises LearnerFault, group ended."""
        try:
            data = json.dumps(command).encode() + b"\n"
            for rank in self._ranks:
                _write(rank, data)
            return self._results(progress)[0]
        except _HungUp as hung_up:
            # A rank that is killed takes the others down with it: name the one that was killed.
            killed = [rank for rank in self._ranks if (rank.process.poll() or 0) < 0]
            fault = _ended(killed[0] if killed else hung_up.rank)
            self.stop(grace=0.0)
            raise fault from None
        except BaseException:
            self.stop(grace=0.0)
            raise

    def stop(self, grace: float = STOP_SECONDS) -> None:
        """End all ranks: closing the pipes lets them go, what stays after `grace` seconds is killed. Idempotent."""
        for rank in self._ranks:
            os.close(rank.command_fd)
        for rank in self._ranks:
            if grace == 0.0:
                rank.process.kill()
            try:
                rank.process.wait(grace or None)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            os.close(rank.reply_fd)
        self._ranks = []
        self._rendezvous.unlink(missing_ok=True)

    def _results(self, progress: Progress | None) -> list[Any]:
        results: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.reply_fd, selectors.EVENT_READ, rank)
            while len(results) < len(self._ranks):
                for key, _ in selector.select():
                    for message in _read(key.data):
                        if "fault" in message:
                            raise LearnerFault(message["fault"])
                        if "progress" in message and progress is not None and key.data.number == 0:
                            progress(*message["progress"])
                        if "result" in message:
                            results[key.data.number] = message["result"]
        return [results[rank.number] for rank in self._ranks]


def _start(number: int, num_ranks: int, threads: int, rendezvous: Path, log: Path) -> _Rank:
    command_read, command_write = os.pipe()
    reply_read, reply_write = os.pipe()
    arguments = [str(command_read), str(reply_write), str(rendezvous), str(threads)]
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "posttrain_core.learner.worker", *arguments],
                env=_environment(number, num_ranks, threads),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(command_read, reply_write),
                process_group=0,  # Ctrl-C is for the parent, which then stops the ranks in order
            )
    except OSError as error:
        os.close(command_write)
        os.close(reply_read)
        raise LearnerFault(f"cannot start rank {number} of the learner: {error}") from error
    finally:
        os.close(command_read)
        os.close(reply_write)
    return _Rank(number, process, command_write, reply_read, log)


def _environment(number: int, num_ranks: int, threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(IMPORT_ROOT), os.environ.get("PYTHONPATH")])),
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin while they wait slow a shared machine down several times.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine, and its name need not resolve
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic matrix products on GPUs
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def _write(rank: _Rank, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(rank.command_fd, data) :]
    except BrokenPipeError:
        # A rank that ended while it started up may have said why.
        for message in _read(rank):
            if "fault" in message:
                raise LearnerFault(message["fault"]) from None
        raise _HungUp(rank) from None


def _read(rank: _Rank) -> list[dict[str, Any]]:
    """The complete messages that have arrived. Raises _HungUp when none can arrive any more."""
    data = os.read(rank.reply_fd, 65536)
    if not data:
        raise _HungUp(rank)
    *lines, rank.pending = (rank.pending + data).split(b"\n")
    return [json.loads(line) for line in lines]


def _ended(rank: _Rank) -> LearnerFault:
    try:
        status = rank.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
    how = "hung up" if status is None else f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
    tail = rank.log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:].strip()
    return LearnerFault(f"learner rank {rank.number} {how}; the end of its log {rank.log}:\n{tail}")
