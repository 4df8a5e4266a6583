"""The pre-warmed parent of executions: a small, single-threaded interpreter that forks into fresh namespaces.

    host --exec--> guard --fork--> zygote --fork per execution--> init --fork--> program
                   lives while     pid 1 of its own pid           pid 1 of     the hostile
                   the host does   namespace, minimal root        a new one    source

It is started with exec, never forked from the host (which holds threads and locks), and reads nothing of a request:
the program's process alone does, so no execution can find another's source in its memory. When the host dies, the
guard or the zygote sees it (end of the control socket, pidfd of the host), and the kernel kills the rest: the end of
a pid namespace's init is the end of everything inside. Unisolated mode runs the same tree without namespaces.

Control messages (SOCK_SEQPACKET, JSON): {"ready": ..} or {"error": ..} at start; then, per execution, the request
{"limits": ..} with descriptors in the order of `Descriptors`, {"started"} with init's pidfd, and {"done"} once
nothing of the execution is alive.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from posttrain_core.sandbox import namespaces, seccomp
from posttrain_core.sandbox.cgroups import remove_folders
from posttrain_core.sandbox.execution import Descriptors, Prepared, run_execution

MESSAGE_BYTES = 4096


class Settings(NamedTuple):
    """How to isolate. `mode` is "privileged" (CAP_SYS_ADMIN here), "userns" or "unisolated"."""

    mode: str
    host_pid: int
    cgroup_procs: list[str]  # files that the zygote writes itself into
    cgroup_folders: list[str]  # removed by the guard at the end


def main(control_fd: int, settings: Settings) -> None:
    """Entry of the exec'ed interpreter."""
    control = socket.socket(fileno=control_fd)
    os.environ.clear()
    try:
        host = os.pidfd_open(settings.host_pid)
        if os.getppid() != settings.host_pid:
            raise ProcessLookupError("the host is gone already")
        base = namespaces.address_space_bytes()
        if settings.mode == "userns":
            namespaces.map_own_ids()
        if settings.mode == "unisolated":
            namespaces.adopt_orphans()
        else:
            namespaces.unshare(namespaces.NEWPID)
        guard = os.getpid()
        child = os.fork()
    except OSError as error:
        _fail(control, error)
        remove_folders([Path(folder) for folder in settings.cgroup_folders])
        sys.exit(1)
    if child == 0:
        _zygote(control, host, settings, base, guard)
    control.close()
    _guard(child, host, settings)


def _send(control: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], fds)


def _fail(control: socket.socket, error: OSError) -> None:
    with suppress(OSError):  # the host may be gone
        _send(control, {"error": error.strerror or str(error)})


def _guard(zygote: int, host: int, settings: Settings) -> NoReturn:
    """Outlive the zygote by a moment: end it with the host, and take its cgroups away."""
    pidfd = os.pidfd_open(zygote)
    select.select([pidfd, host], [], [])
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitpid(zygote, 0)
    if settings.mode == "unisolated":
        _sweep()
    remove_folders([Path(folder) for folder in settings.cgroup_folders])
    os._exit(0)


# --- the zygote -------------------------------------------------------------------------------------------------


def _zygote(control: socket.socket, host: int, settings: Settings, base: int, guard: int) -> NoReturn:
    joined = _join(settings.cgroup_procs)
    try:
        prepared = _prepare(settings, base, guard)
    except OSError as error:
        _fail(control, error)
        os._exit(1)
    _send(
        control,
        {"ready": True, "proc": prepared.has_proc, "seccomp": bool(prepared.filter), "cgroup": joined},
    )
    gc.collect()
    gc.freeze()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(host, select.POLLIN)
    while True:
        if any(fd == host for fd, _ in poll.poll()):
            os._exit(0)
        data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, len(Descriptors._fields))
        if not data:
            os._exit(0)
        _execute(control, host, json.loads(data), Descriptors(*fds), prepared)


def _join(cgroup_procs: list[str]) -> bool:
    """Enter the cgroup made for this zygote. Who may make one may still not be allowed to move into it."""
    try:
        for path in cgroup_procs:
            Path(path).write_text("0")
    except OSError:
        return False
    return bool(cgroup_procs)


def _prepare(settings: Settings, base: int, guard: int) -> Prepared:
    namespaces.die_with_parent(signal.SIGKILL)
    if settings.mode == "unisolated":
        namespaces.adopt_orphans()  # the attribute is not inherited from the guard
        return Prepared("unisolated", True, b"", 0, base)
    user = namespaces.spare_user(guard) if settings.mode == "privileged" else 0
    namespaces.unshare(namespaces.NEWNS)
    has_proc = namespaces.enter_minimal_root()
    sys.path[:] = [entry for entry in sys.path if Path(entry).exists()]
    return Prepared(settings.mode, has_proc, seccomp.build_filter(), user, base)


def _execute(control: socket.socket, host: int, request: dict[str, Any], fds: Descriptors, prepared: Prepared) -> None:
    """Fork one execution, report it, and wait for its end; the zygote does nothing else meanwhile."""
    if prepared.mode != "unisolated":
        namespaces.unshare(namespaces.NEWPID)
    init = os.fork()
    if init == 0:
        control.close()
        os.close(host)
        run_execution(request, fds, prepared)
    if prepared.mode != "unisolated":
        namespaces.rejoin(namespaces.NEWPID)
    for fd in fds:
        os.close(fd)
    pidfd = os.pidfd_open(init)
    _send(control, {"started": True}, (pidfd,))
    poll = select.poll()
    for watched in (pidfd, host):
        poll.register(watched, select.POLLIN)
    poll.register(control, 0)  # only its end
    events = poll.poll()
    if any(fd != pidfd for fd, _ in events):
        os._exit(0)
    os.close(pidfd)
    os.waitpid(init, 0)
    if prepared.mode == "unisolated":
        _sweep()
    _send(control, {"done": True})


def _sweep() -> None:
    """Without a pid namespace: kill what the program left behind, which this process has adopted."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
        for pid in pids:
            os.waitpid(int(pid), 0)
