"""What callers rely on: results, order, limits, several threads, and nothing alive once the host is gone."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from posttrain_core.config import EmbeddedSandboxConfig, UnisolatedSandboxConfig
from posttrain_core.errors import ConfigError
from posttrain_core.records import CaseReturn, ExecutionStatus
from posttrain_core.sandbox import Limits, ProgramRequest
from posttrain_core.sandbox.cgroups import _parents
from posttrain_core.sandbox.embedded import ZygotePool
from posttrain_core.sandbox.factory import make_sandbox
from posttrain_core.sandbox.features import probe
from posttrain_core.sandbox.launch import Zygote
from posttrain_core.sandbox.unisolated import UnisolatedSandboxWarning

ROOT = Path(__file__).parents[2]
LIMITS = Limits(wall_seconds=3.0, cpu_seconds=2.0)
NAMED_SLEEPER = """
import ctypes, os, time
def attack(name):
    os.fork()
    ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME: what the test looks for
    time.sleep(600)
"""


@pytest.fixture
def unisolated() -> Iterator[ZygotePool]:
    with pytest.warns(UnisolatedSandboxWarning, match="YOUR rights"):
        sandbox = make_sandbox(UnisolatedSandboxConfig(i_understand_that_model_code_runs_with_my_rights=True))
    assert isinstance(sandbox, ZygotePool)
    yield sandbox
    sandbox.close()


def named(name: str) -> list[int]:
    """Processes of that name, and those still dying."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and (folder / "comm").read_text().strip() == name:
                found.append(int(folder.name))
    return found


def cgroups_of(pid: int) -> list[Path]:
    """Cgroups that the process `pid` made and that are still there."""
    return [folder for _, *parents in _parents() for parent in parents for folder in parent.glob(f"posttrain-{pid}-*")]


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 10 s")


def test_expressions_and_functions(sandbox: ZygotePool) -> None:
    requests = [
        ProgramRequest("x * 2 + 1", "", ("[3]", "[-4]")),
        ProgramRequest("def f(a, b):\n    print('said')\n    return {'sum': a + b}\n", "f", ("[1, 2]",)),
        ProgramRequest("10 // x", "", ("[5]", "[0]", "[2]")),
        ProgramRequest("(", "", ("[1]",)),
        ProgramRequest("def g(): pass", "f", ("[]",)),
    ]
    plain, function, partial, syntax, missing = sandbox.run_programs(requests, LIMITS)
    assert plain.status is ExecutionStatus.OK
    assert plain.returns == (CaseReturn("0", True, "7"), CaseReturn("1", True, "-7"))
    assert (function.returns[0].value, function.stdout) == ('{"sum":3}', "said\n")
    assert partial.status is ExecutionStatus.RUNTIME_ERROR
    assert [case.ok for case in partial.returns] == [True, False, True]
    assert partial.returns[1].error.startswith("ZeroDivisionError")
    assert (syntax.status, syntax.returns) == (ExecutionStatus.RUNTIME_ERROR, ())
    assert "SyntaxError" in syntax.stderr
    assert "does not define the function f" in missing.stderr
    assert {result.isolation for result in (plain, function, partial, syntax, missing)} == {sandbox.isolation}
    assert sandbox.isolation.startswith("namespaces")


def test_results_keep_the_order_of_requests(sandbox: ZygotePool) -> None:
    requests = [ProgramRequest(f"x + {n}", "", ("[0]",)) for n in range(20)]
    results = sandbox.run_programs(requests, LIMITS)
    assert [result.returns[0].value for result in results] == [str(n) for n in range(20)]


def test_executions_at_once_have_pid_namespaces_of_their_own(sandbox: ZygotePool) -> None:
    name = f"sbp-{os.getpid() % 10**8}"
    requests = [ProgramRequest(NAMED_SLEEPER + "#" * n, "attack", (f'["{name}"]',)) for n in range(2)]
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(sandbox.run_programs, requests, Limits(wall_seconds=2.0))
        wait_for(lambda: len(named(name)) == 4)
        status = [Path(f"/proc/{pid}/status").read_text() for pid in named(name)]
        assert sorted(re.search(r"NSpid:.*\t(\d+)\n", text).group(1) for text in status) == ["2", "2", "3", "3"]
        assert {result.status for result in future.result()} == {ExecutionStatus.TIME_LIMIT}
    assert not named(name)


def test_equal_requests_run_once_and_sets_are_ordered_alike(sandbox: ZygotePool) -> None:
    request = ProgramRequest("__import__('time').monotonic_ns()", "", ("[0]",))
    first, other, second = sandbox.run_programs([request, ProgramRequest("x", "", ("[1]",)), request], LIMITS)
    assert first == second != other
    orders = {
        result.returns[0].value
        for n in range(4)
        for result in sandbox.run_programs(
            [ProgramRequest("list({'a', 'b', 'c', 'd', 'e'})" + " " * n, "", ("[0]",))], LIMITS
        )
    }
    assert len(orders) == 1


def test_addresses_do_not_make_results_differ(sandbox: ZygotePool) -> None:
    source = "def f():\n    print(f)\n    raise ValueError(f)\n"
    requests = [ProgramRequest(source + "#" * n, "f", ("[]",)) for n in range(4)]
    results = sandbox.run_programs(requests, LIMITS)
    assert {result.stdout for result in results} == {"<function f at 0x>\n"}
    assert {result.reason for result in results} == {"case 0: ValueError: <function f at 0x>"}


def test_many_threads_share_one_sandbox(sandbox: ZygotePool) -> None:
    def work(thread: int) -> list[str]:
        requests = [ProgramRequest(f"x + {100 * thread + n}", "", ("[0]",)) for n in range(5)]
        return [result.returns[0].value for result in sandbox.run_programs(requests, LIMITS)]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [[str(100 * t + n) for n in range(5)] for t in range(4)]


def test_a_large_request_arrives_whole(sandbox: ZygotePool) -> None:
    text = "z" * 300_000
    result = sandbox.run_programs([ProgramRequest("len(x)", "", (f'["{text}"]',))], LIMITS)[0]
    assert result.returns[0].value == "300000"


def test_executions_do_not_leak_descriptors(sandbox: ZygotePool) -> None:
    def open_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    sandbox.run_programs([ProgramRequest(f"x+{n}", "", ("[1]",)) for n in range(4)], LIMITS)
    before = open_descriptors()
    sandbox.run_programs([ProgramRequest(f"x+{n}", "", ("[2]",)) for n in range(20)], LIMITS)
    assert open_descriptors() == before


def test_a_zygote_that_dies_is_replaced_and_the_request_tried_again(sandbox: ZygotePool) -> None:
    pool = ZygotePool((_mode(sandbox),), workers=1)
    try:
        os.kill(pool._idle[0]._process.pid, signal.SIGKILL)
        result = pool.run_programs([ProgramRequest("x + 1", "", ("[1]",))], LIMITS)[0]
        assert result.returns[0].value == "2"
    finally:
        pool.close()


def test_zygotes_that_keep_dying_make_an_infra_result(sandbox: ZygotePool) -> None:
    pool = ZygotePool((_mode(sandbox),), workers=1)
    request = ProgramRequest(NAMED_SLEEPER, "attack", ('["sbx-infra"]',))
    try:
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(pool.run_programs, [request], Limits(wall_seconds=60.0))
            for _ in range(2):
                wait_for(lambda: len(named("sbx-infra")) == 2)
                _kill_zygotes_below(os.getpid(), of=named("sbx-infra")[0])
                wait_for(lambda: not named("sbx-infra"))
            result = future.result(timeout=30)[0]
        assert (result.status, result.returns) == (ExecutionStatus.INFRA, ())
        assert "parent process failed" in result.reason
        assert pool.run_programs([ProgramRequest("x", "", ("[1]",))], LIMITS)[0].status is ExecutionStatus.OK
    finally:
        pool.close()


def _kill_zygotes_below(top: int, of: int) -> None:
    """Kill the child of `top` that `of` descends from."""
    while (parent := int(Path(f"/proc/{of}/stat").read_text().rpartition(")")[2].split()[1])) != top:
        of = parent
    os.kill(of, signal.SIGKILL)


def _mode(sandbox: ZygotePool) -> str:
    return sandbox._modes[0]


@pytest.mark.parametrize("mode", ["own", "unisolated"])
def test_nothing_survives_a_host_that_is_killed(sandbox: ZygotePool, mode: str) -> None:
    name = f"sbx-{os.getpid() % 10**8}"
    host = f"""
        from posttrain_core.sandbox import Limits, ProgramRequest
        from posttrain_core.sandbox.embedded import ZygotePool
        pool = ZygotePool(({_mode(sandbox) if mode == "own" else mode!r},), workers=2)
        sources = [{NAMED_SLEEPER!r} + "#" * n for n in range(2)]
        requests = [ProgramRequest(source, "attack", ('["{name}"]',)) for source in sources]
        pool.run_programs(requests, Limits(wall_seconds=600.0))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(host)], cwd=ROOT) as process:
        try:
            wait_for(lambda: len(named(name)) == 4)
            below = _below(process.pid)
            assert len(below) >= 8  # two guards, two zygotes, two inits, ...
        finally:
            process.kill()
    wait_for(lambda: not named(name) and not any(Path(f"/proc/{pid}").exists() for pid in below))
    assert not cgroups_of(process.pid)


def _below(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [grandchild for child in children for grandchild in _below(child)]


def test_unisolated_runs_the_same_programs_and_sweeps_up(unisolated: ZygotePool) -> None:
    name = f"sbu-{os.getpid() % 10**8}"
    source = f"""
import os, time, ctypes
def f(x):
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(15, b"{name}")
        time.sleep(600)
    time.sleep(0.2)
    return x + 1
"""
    result = unisolated.run_programs([ProgramRequest(source, "f", ("[1]",))], LIMITS)[0]
    assert (result.status, result.returns[0].value, result.isolation) == (ExecutionStatus.OK, "2", "unisolated")
    assert not named(name)
    late = unisolated.run_programs([ProgramRequest("while True: pass", "f", ("[1]",))], Limits(wall_seconds=0.5))[0]
    assert late.status is ExecutionStatus.TIME_LIMIT


def test_the_factory_makes_what_the_configuration_names() -> None:
    sandbox = make_sandbox(EmbeddedSandboxConfig(workers=1))
    try:
        assert sandbox.isolation.startswith("namespaces")
    finally:
        sandbox.close()


def test_a_machine_that_cannot_isolate_is_refused_with_the_way_out() -> None:
    host = """
        from posttrain_core.errors import SandboxUnavailable
        from posttrain_core.sandbox import embedded, namespaces, seccomp
        namespaces.forbid_new_privileges()
        seccomp.install_filter(seccomp.build_filter())  # refuses namespaces, as container runtimes do
        try:
            embedded.EmbeddedSandbox()
        except SandboxUnavailable as error:
            print(error)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(host)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "userns: unshare" in told
    assert "apparmor_restrict_unprivileged_userns" in told
    assert "sandbox.type: unisolated" in told


def test_probe_agrees_with_what_executions_get(sandbox: ZygotePool) -> None:
    found = probe()
    assert str(found["label"]).startswith("namespaces")
    assert found["problem"] == ""
    assert ("cgroup" in str(found["label"])) == bool(found["cgroup_version"])


@pytest.mark.parametrize(
    "wrong", [{"wall_seconds": 0}, {"memory_mib": -1}, {"memory_mib": 2**54}, {"cpu_seconds": float("nan")}]
)
def test_absurd_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]


def test_closing_ends_every_process(sandbox: ZygotePool) -> None:
    before = set(cgroups_of(os.getpid()))
    zygote = Zygote(_mode(sandbox))
    below = _below(os.getpid())
    made = set(cgroups_of(os.getpid())) - before
    zygote.close()
    assert zygote._process.pid in below
    assert bool(made) == ("cgroup" in zygote.isolation)
    assert not any(folder.exists() for folder in made)
    wait_for(lambda: not Path(f"/proc/{zygote._process.pid}").exists())
