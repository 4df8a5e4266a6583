"""`RankGroup`: the learner's rank processes as one thing that is given commands. No torch here.

When one of them ends, fails or all fall silent, the parent ends them all, because collectives cannot be continued.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from posttrain_core.config import DeepSpeedLearnerConfig
from posttrain_core.errors import LearnerFault, PolicyMismatch
from posttrain_core.learner.connection import receive, send
from posttrain_core.learner.launch import STOP_SECONDS, Rank, launch, tail

FAULTS = {fault.__name__: fault for fault in (LearnerFault, PolicyMismatch)}
ANSWER_SECONDS = 3.0  # that a rank has to say where it is

Progress = Callable[[int, int], None]


class _HungUp(Exception):
    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank


class RankGroup:
    """Starts the ranks and returns at once; they import for some seconds while `call` can already be given.

    `scratch` exists; the ranks' logs go there.
    """

    def __init__(self, config: DeepSpeedLearnerConfig, scratch: Path) -> None:
        self.stall_seconds = config.stall_seconds
        self._launch = launch(config, scratch)

    @property
    def pids(self) -> list[int]:
        return self._launch.pids()

    def call(self, command: Mapping[str, Any], progress: Progress | None = None) -> Any:
        """Give every rank the command and wait for all; returns rank 0's result. Raises one of FAULTS, group ended."""
        try:
            ranks = self._launch.ranks()
            for rank in ranks:
                _send(rank, command)
            return self._results(ranks, progress)[0]
        except _HungUp as hung_up:
            # A rank that is killed takes the others down with it: name the one that was killed.
            killed = [rank for rank in ranks if rank.process is not None and (rank.process.poll() or 0) < 0]
            fault = self._ended(killed[0] if killed else hung_up.rank)
            self.stop(grace=0.0)
            raise fault from None
        except BaseException:
            self.stop(grace=0.0)
            raise

    def stop(self, grace: float = STOP_SECONDS) -> None:
        """End all ranks. Idempotent."""
        self._launch.stop(grace)

    def _results(self, ranks: Sequence[Rank], progress: Progress | None) -> dict[int, Any]:
        results: dict[int, Any] = {}
        waiting = {rank.connection: rank for rank in ranks}
        last_sign = time.monotonic()
        while waiting:
            ready = wait(list(waiting), max(0.0, last_sign + self.stall_seconds - time.monotonic()))
            if not ready:
                raise self._silent(list(waiting.values()))
            last_sign = time.monotonic()
            for rank in [waiting[line] for line in ready]:  # type: ignore[index]
                message = _receive(rank)
                if "progress" in message and progress is not None and rank.number == 0:
                    progress(*message["progress"])
                if "result" in message:
                    results[rank.number] = message["result"]
                    del waiting[rank.connection]
        return results

    def _silent(self, ranks: Sequence[Rank]) -> LearnerFault:
        """Which ranks are hung and where: those that can still say where they are mostly wait for one that cannot."""
        places = {}
        for rank in ranks:
            _send(rank, {"call": "where"})
        deadline = time.monotonic() + ANSWER_SECONDS
        for rank in ranks:
            while rank.number not in places and rank.connection.poll(max(0.0, deadline - time.monotonic())):
                places[rank.number] = _receive(rank).get("where")
        lines = [f"the learner reported no progress for {self.stall_seconds:g} s (learner.stall_seconds)"]
        for rank in sorted(ranks, key=lambda rank: bool(places.get(rank.number))):
            if place := places.get(rank.number):
                lines.append(f"{rank.name} is at\n{place}")
            else:
                lines.append(
                    f"{rank.name} does not answer: it is stopped, or stuck outside Python; "
                    f"the end of its log {rank.log}:\n{tail(rank.log)}"
                )
        return LearnerFault("\n".join(lines))

    def _ended(self, rank: Rank) -> LearnerFault:
        how = self._launch.ending(rank)
        return LearnerFault(f"{rank.name} {how}; the end of its log {rank.log}:\n{tail(rank.log)}")


def _send(rank: Rank, message: Mapping[str, Any]) -> None:
    try:
        send(rank.connection, message)
    except OSError:
        while True:  # a rank that ended while it started up may have said why
            _receive(rank)


def _receive(rank: Rank) -> dict[str, Any]:
    """The next message. Raises the rank's fault when it is one, _HungUp when none can come any more."""
    try:
        message = receive(rank.connection)
    except (EOFError, OSError):
        raise _HungUp(rank) from None
    if "fault" in message:
        raise FAULTS[message["fault"]](message["text"])
    return message
