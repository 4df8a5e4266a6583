"""One execution, after the zygote's fork: init sets the stage, forks the program, watches it, leaves the evidence.

Init is pid 1 of the execution's namespace and the only process in it that is ours; it hands the host one line of
JSON: how the program ended and which limits were reached. What init or the program's process cannot set up before
the program starts is reported as an error, and never runs anything.
"""

import fcntl
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from posttrain_core.sandbox import driver, namespaces, seccomp

RESULT_FD = 3
TICK_SECONDS = 0.02


class Descriptors(NamedTuple):
    payload: int
    stdout: int
    stderr: int
    results: int
    evidence: int


class Prepared(NamedTuple):
    """What the zygote knows once it is set up."""

    mode: str
    has_proc: bool
    filter: bytes
    user: int  # uid and gid to switch to; 0 is none
    base_address_space: int


def run_execution(request: dict[str, Any], fds: Descriptors, prepared: Prepared) -> NoReturn:
    """pid 1 of the execution: set the stage, fork the program, watch it, and leave the evidence."""
    evidence: dict[str, Any]
    try:
        limits = request["limits"]
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        _set_stage(limits, request["workdir"], prepared)
        program = os.fork()
        if program == 0:
            _program(limits, fds, prepared)
        for fd in (fds.payload, fds.stdout, fds.stderr, fds.results):
            os.close(fd)
        if prepared.mode != "unisolated":
            namespaces.drop_privileges(prepared.user)
        evidence = _watch(program, limits, prepared)
    except BaseException as error:
        evidence = _blame(error)
    _leave(fds.evidence, evidence)


def _blame(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"}


def _leave(fd: int, evidence: dict[str, Any]) -> NoReturn:
    """Write a line of evidence and end, whatever happens: a forked process never returns into the zygote's loop."""
    try:
        os.write(fd, json.dumps(evidence).encode() + b"\n")
    finally:
        os._exit(0)


def _set_stage(limits: dict[str, Any], workdir: str, prepared: Prepared) -> None:
    if prepared.mode == "unisolated":
        namespaces.die_with_parent(signal.SIGKILL)
        os.chdir(workdir)
        return
    namespaces.unshare(
        namespaces.NEWNS | namespaces.NEWNET | namespaces.NEWIPC | namespaces.NEWUTS | namespaces.NEWCGROUP
    )
    namespaces.mount_workdir(limits["disk_mib"], prepared.user or namespaces.INNER_ID)
    if prepared.has_proc:
        namespaces.mount_own_proc()
    os.chdir(namespaces.WORKDIR)


def _program(limits: dict[str, Any], fds: Descriptors, prepared: Prepared) -> NoReturn:
    """The program's process: give everything up, then run it. Before that point, a failure is ours."""
    evidence = fcntl.fcntl(fds.evidence, fcntl.F_DUPFD_CLOEXEC, 64)
    try:
        payload = os.pread(fds.payload, os.fstat(fds.payload).st_size, 0)
        os.setsid()
        _arrange_descriptors(fds, evidence)
        namespaces.set_limits(_resource_limits(limits, prepared))
        if prepared.mode == "unisolated":
            namespaces.die_with_parent(signal.SIGKILL)
            namespaces.forbid_new_privileges()
        else:
            namespaces.drop_privileges(prepared.user)
        if prepared.filter:
            seccomp.install_filter(prepared.filter)
    except BaseException as error:
        _leave(evidence, _blame(error))
    code = 1
    try:
        os.close(evidence)
        for name in [name for name in sys.modules if name.startswith("posttrain_core")]:
            del sys.modules[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        code = driver.run_program(payload, RESULT_FD)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _arrange_descriptors(fds: Descriptors, evidence: int) -> None:
    """0 is /dev/null, 1 and 2 the output pipes, RESULT_FD the frames, `evidence` stays; all others are closed."""
    wanted = (os.open("/dev/null", os.O_RDONLY), fds.stdout, fds.stderr, fds.results)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, evidence + 1) for fd in wanted]
    for number, fd in enumerate(high):
        os.dup2(fd, number)
    namespaces.close_descriptors(RESULT_FD + 1, evidence - 1)
    namespaces.close_descriptors(evidence + 1)


def _resource_limits(limits: dict[str, Any], prepared: Prepared) -> dict[int, int]:
    """The address space is the interpreter's own plus the limit. The count of processes is one user's in one user
    namespace: it includes init, and in userns mode guard and zygote; the kernel ignores it for a host's root."""
    wanted = {
        resource.RLIMIT_AS: prepared.base_address_space + limits["memory_mib"] * namespaces.MIB,
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_FSIZE: limits["disk_mib"] * namespaces.MIB,
        resource.RLIMIT_NOFILE: limits["num_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if prepared.mode != "unisolated":
        wanted[resource.RLIMIT_NPROC] = limits["num_processes"] + (1 if prepared.mode == "privileged" else 3)
    return wanted


def _watch(program: int, limits: dict[str, Any], prepared: Prepared) -> dict[str, Any]:
    """Reap until the program ends; every tick, sum what all processes hold and end the execution above a limit."""
    evidence: dict[str, Any] = {"memory_full": False, "processes_full": False}
    can_look = prepared.has_proc and prepared.mode != "unisolated"
    inherited = _private_bytes(os.getpid()) if can_look else 0
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, TICK_SECONDS)
        while (ended := os.wait4(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return evidence | _post_mortem(ended[1], ended[2], prepared)
        if can_look:
            memory, tasks = _usage(inherited)
            evidence["processes_full"] |= tasks >= limits["num_processes"]
            if memory > limits["memory_mib"] * namespaces.MIB:
                return evidence | {"memory_full": True, "exit": -signal.SIGKILL, "cpu": 0.0, "disk_full": False}


def _usage(inherited: int) -> tuple[int, int]:
    """Memory and threads of everyone in this pid namespace but this process. Memory is private bytes above what
    each has from the zygote; pages that a program's own forks still share count once per process."""
    memory = tasks = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or folder.name == "1":
            continue
        try:
            tasks += int((folder / "stat").read_text().rpartition(")")[2].split()[17])
            memory += max(0, _private_bytes(int(folder.name)) - inherited)
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    return memory, tasks


def _private_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize()


def _post_mortem(status: int, usage: resource.struct_rusage, prepared: Prepared) -> dict[str, Any]:
    disk_full = False
    if prepared.mode != "unisolated":
        disk = os.statvfs(".")
        disk_full = disk.f_bfree == 0 or disk.f_ffree == 0
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak_kib": usage.ru_maxrss,
        "disk_full": disk_full,
    }
