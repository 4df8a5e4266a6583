"""The host's end of one zygote: start it, hand it an execution, collect what comes back, kill it in time."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import posttrain_core
from posttrain_core.errors import SandboxUnavailable
from posttrain_core.sandbox.cgroups import Cgroup, make_cgroup
from posttrain_core.sandbox.protocol import Limits, ProgramRequest

START_SECONDS = 30.0
END_SECONDS = 10.0  # from our kill to the zygote's word that nothing is left
_READ_BYTES = 1 << 16
_BOOTSTRAP = """import sys
sys.path.insert(0, {folder!r})
from posttrain_core.sandbox import zygote
del sys.path[0]
zygote.main({control}, zygote.Settings(**{settings!r}))
"""
_FLAGS = ("-s", "-S", "-P", "-u", "-X", "utf8")  # not -I, under which PYTHONHASHSEED would be ignored


class Kill(StrEnum):
    """Why the host ended an execution."""

    WALL = "wall"
    OUTPUT = "output"
    RESULTS = "results"


class ZygoteDied(Exception):
    """The zygote ended or stopped answering; the execution it held has no result."""


@dataclass
class Observed:
    """Raw evidence of one execution: three byte streams, init's report, our own kill, the cgroup's counters."""

    stdout: bytes
    stderr: bytes
    results: bytes
    evidence: dict[str, Any]
    kill: Kill | None
    num_memory_kills: int
    num_refused_processes: int


@dataclass
class _Stream:
    """One pipe from the sandbox; at most `cap` bytes are kept."""

    fd: int
    cap: int
    overflow: Kill | None
    data: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Take what is there; False at the end."""
        try:
            chunk = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:  # the program has opened its own pipe for reading and was faster
            return True
        self.data += chunk[: self.cap + 1 - len(self.data)]
        return bool(chunk)

    @property
    def too_long(self) -> bool:
        return len(self.data) > self.cap


class Zygote:
    """One warm parent, one execution at a time. Raises SandboxUnavailable where it cannot be set up."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._cgroup: Cgroup | None = None if mode == "unisolated" else make_cgroup()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as errors:
            try:
                self._process = self._start(theirs.fileno(), errors.fileno())
            except OSError as error:
                self._control.close()
                if self._cgroup:
                    self._cgroup.remove()
                raise SandboxUnavailable(f"cannot start {sys.executable}: {error}") from error
            theirs.close()
            self.features = self._ready(errors.fileno())

    def _start(self, control: int, errors: int) -> "subprocess.Popen[bytes]":
        interpreter = getattr(sys, "_base_executable", "") or sys.executable  # not a venv's: no site-packages
        with tempfile.TemporaryFile() as script:
            script.write(self._bootstrap(control).encode())
            script.seek(0)
            return subprocess.Popen(
                [interpreter, *_FLAGS, "-"],  # programs can see this command line, so it says nothing
                stdin=script,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(control,),
                env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
                start_new_session=True,
            )

    def _bootstrap(self, control: int) -> str:
        folders = [str(folder) for folder in self._cgroup.folders] if self._cgroup else []
        settings = {
            "mode": self.mode,
            "host_pid": os.getpid(),
            "cgroup_procs": [f"{folder}/cgroup.procs" for folder in folders],
            "cgroup_folders": folders,
        }
        folder = str(Path(posttrain_core.__file__).parent.parent)
        return _BOOTSTRAP.format(folder=folder, control=control, settings=settings)

    def _ready(self, errors: int) -> dict[str, Any]:
        try:
            message, _ = self._receive(START_SECONDS)
        except ZygoteDied as error:
            self.close()
            text = os.pread(errors, 2000, 0).decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxUnavailable(f"the sandbox's parent process did not start: {text or error}") from error
        if "error" in message:
            self.close()
            raise SandboxUnavailable(message["error"])
        if self._cgroup and not message["cgroup"]:
            self._cgroup.remove()
            self._cgroup = None
        return message

    @property
    def isolation(self) -> str:
        """What is applied, for the record."""
        if self.mode == "unisolated":
            return "unisolated"
        parts = ["namespaces", "seccomp" if self.features["seccomp"] else "", "cgroup" if self._cgroup else "rlimits"]
        return "+".join(filter(None, [*parts, "" if self.features["proc"] else "no_proc"]))

    def _receive(self, seconds: float) -> tuple[dict[str, Any], list[int]]:
        self._control.settimeout(seconds)
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
        except OSError as error:
            raise ZygoteDied(f"no answer: {error}") from error
        if not data:
            raise ZygoteDied("it ended")
        message: dict[str, Any] = json.loads(data)
        return message, fds

    def execute(self, request: ProgramRequest, limits: Limits) -> Observed:
        """Run one request in processes of its own; when this returns, none of them is alive. Raises ZygoteDied."""
        before = self._events(limits)
        workdir = tempfile.TemporaryDirectory(prefix="posttrain-") if self.mode == "unisolated" else nullcontext("")
        streams: list[_Stream] = []
        try:
            with workdir as folder:
                pidfd = self._send(request, limits, folder, streams)
                try:
                    kill = self._drain(pidfd, streams, time.monotonic() + limits.wall_seconds)
                finally:
                    os.close(pidfd)
        finally:
            for stream in streams:
                os.close(stream.fd)
        after = self._events(None)
        stdout, stderr, results, evidence = (bytes(stream.data[: stream.cap]) for stream in streams)
        report = {key: value for line in evidence.splitlines() for key, value in json.loads(line).items()}
        return Observed(stdout, stderr, results, report, kill, after[0] - before[0], after[1] - before[1])

    def _events(self, limits: Limits | None) -> tuple[int, int]:
        if self._cgroup is None:
            return 0, 0
        try:
            if limits:
                self._cgroup.limit(limits)
            return self._cgroup.events()
        except OSError as error:
            raise ZygoteDied(f"its cgroup is gone: {error}") from error

    def _send(self, request: ProgramRequest, limits: Limits, workdir: str, streams: list[_Stream]) -> int:
        """Hand over the request and the writing ends of four pipes, whose reading ends are added to `streams`;
        returns the pidfd of the execution's init."""
        payload = os.memfd_create("payload")
        given = [payload]
        try:
            with open(payload, "wb", closefd=False) as file:
                file.write(json.dumps(asdict(request)).encode())
            for overflow in (Kill.OUTPUT, Kill.OUTPUT, Kill.RESULTS, None):
                reading, writing = os.pipe()
                os.set_blocking(reading, False)
                streams.append(_Stream(reading, limits.output_kib << 10, overflow))
                given.append(writing)
            message = {"limits": limits.whole_numbers(), "workdir": workdir}
            self._control.settimeout(END_SECONDS)
            socket.send_fds(self._control, [json.dumps(message).encode()], given)
        except OSError as error:
            raise ZygoteDied(f"it does not take requests: {error}") from error
        finally:
            for fd in given:
                os.close(fd)
        _, fds = self._receive(END_SECONDS)
        return fds[0]

    def _drain(self, pidfd: int, streams: list[_Stream], deadline: float) -> Kill | None:
        """Read all pipes at once until nothing of the execution lives; kill it at the deadline or above a cap."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        by_fd = {stream.fd: stream for stream in streams}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        kill: Kill | None = None
        done = False
        while by_fd or not done:
            events = poll.poll(0 if done else max(0.0, deadline - time.monotonic()) * 1000)
            if done and not events:
                break  # a fork of the host may hold a writing end; what was written has been read
            for fd, _ in events:
                stream = by_fd.get(fd)
                if stream is None:
                    self._receive(END_SECONDS)
                    poll.unregister(fd)
                    done = True
                elif not stream.read():
                    poll.unregister(fd)
                    del by_fd[fd]
                elif stream.too_long and kill is None:
                    kill = stream.overflow
                    deadline = _end(pidfd)
            if done or time.monotonic() < deadline:
                continue
            if kill is not None:
                raise ZygoteDied("it did not end an execution that was killed")
            kill = Kill.WALL
            deadline = _end(pidfd)
        return kill

    def close(self) -> None:
        """End the zygote and with it, by the kernel, everything it started."""
        self._control.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._cgroup:
            self._cgroup.remove()


def _end(pidfd: int) -> float:
    """SIGKILL to pid 1 of the execution; the kernel ends the rest. Returns the new deadline."""
    with suppress(ProcessLookupError):  # it has just ended by itself
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return time.monotonic() + END_SECONDS
