"""Every hostile program ends as it must, in time, leaves nothing behind, and spoils nothing for the next one."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain_core.records import ExecutionStatus
from posttrain_core.sandbox import Limits, ProgramRequest, ProgramResult
from posttrain_core.sandbox.embedded import ZygotePool
from tests.sandbox.hostile import CASES

LIMITS = Limits(wall_seconds=5.0, cpu_seconds=3.0, memory_mib=128, disk_mib=4)
SHORT = replace(LIMITS, wall_seconds=0.5, cpu_seconds=1.0)  # for what must run into them


def descendants() -> set[int]:
    """Processes below this one, by the parent that the kernel gives."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {os.getpid()}


def run(sandbox: ZygotePool, source: str, inputs: tuple[str, ...] = ("[]",), limits: Limits = LIMITS) -> ProgramResult:
    """One execution, after which the invariants of every execution are checked."""
    before = descendants()
    start = time.monotonic()
    result = sandbox.run_programs([ProgramRequest(source, "attack", inputs)], limits)[0]
    assert time.monotonic() - start <= limits.wall_seconds + 2
    assert descendants() <= before, "something survived"
    assert canary(sandbox), "the next execution was spoilt"
    assert max(len(result.stdout.encode()), len(result.stderr.encode())) <= 3 * LIMITS.output_kib << 10
    return result


def canary(sandbox: ZygotePool) -> bool:
    result = sandbox.run_programs([ProgramRequest("x * 3 + 1", "", ("[5]",))], LIMITS)[0]
    return result.status is ExecutionStatus.OK and result.returns[0].value == "16"


@pytest.mark.parametrize("name", CASES)
def test_hostile_program(sandbox: ZygotePool, name: str) -> None:
    case = CASES[name]
    result = run(sandbox, case.source, limits=SHORT if ExecutionStatus.TIME_LIMIT in case.statuses else LIMITS)
    assert result.status in case.statuses, result
    if case.value:
        assert [case_return.value for case_return in result.returns] == [case.value], result
    elif result.status is not ExecutionStatus.OK:
        assert not any(case_return.ok for case_return in result.returns), result


def test_planted_secret_is_not_found(sandbox: ZygotePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "canary-5f2d9e"
    monkeypatch.setenv("POSTTRAIN_TEST_KEY", secret)
    file = tmp_path / "key"
    file.write_text(secret)
    source = """
import os, sys
def attack(path, half):
    found = []
    wanted = half + "5f2d9e"
    if wanted in str(dict(os.environ)) + str(sys.argv): found.append("environment")
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    places = [path] + ["/proc/%s/%s" % (pid, name) for pid in pids for name in ("environ", "cmdline")]
    for place in places:
        try: text = open(place, "rb").read()
        except OSError: continue
        if wanted.encode() in text: found.append(place)
    return found
"""
    result = run(sandbox, source, (f'["{file}","canary-"]',))
    assert [case.value for case in result.returns] == ["[]"]


def test_nothing_reaches_a_listener_on_the_host(sandbox: ZygotePool) -> None:
    source = """
import socket
def attack(port, name):
    reached = []
    for family, address in ((2, ("127.0.0.1", port)), (1, "\\0" + name)):
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.settimeout(0.5)
            try: s.connect(address)
            except OSError: continue
            reached.append(family)
    return reached
"""
    name = f"posttrain-test-{os.getpid()}"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
        tcp.bind(("127.0.0.1", 0))
        abstract.bind("\0" + name)
        for listener in (tcp, abstract):
            listener.listen()
            listener.setblocking(False)
        result = run(sandbox, source, (f'[{tcp.getsockname()[1]},"{name}"]',))
        assert [case.value for case in result.returns] == ["[]"]
        for listener in (tcp, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_nothing_is_left_for_the_next_execution(sandbox: ZygotePool) -> None:
    leave = """
import os, sys
def attack():
    open("left", "w").write("x")
    sys.modules["left"] = sys
    os.environ["LEFT"] = "x"
    import builtins
    builtins.abs = lambda _: 0
    return os.listdir(".")
"""
    look = """
import os, sys
def attack():
    return [os.listdir("."), "left" in sys.modules, "LEFT" in os.environ, abs(-3)]
"""
    for _ in range(3):  # whichever zygote serves it
        assert run(sandbox, leave).returns[0].value == '["left"]'
        assert run(sandbox, look).returns[0].value == "[[],false,false,3]"
