"""The embedded backend: a pool of zygotes on Linux namespaces; no daemon, no root, no Docker."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from posttrain_core.errors import SandboxUnavailable
from posttrain_core.records import ExecutionStatus
from posttrain_core.sandbox.classify import classify
from posttrain_core.sandbox.launch import Zygote, ZygoteDied
from posttrain_core.sandbox.protocol import Limits, ProgramRequest, ProgramResult

MODES = ("privileged", "userns")
ATTEMPTS = 2  # a request whose zygote died is tried once more, in a fresh one

_REFUSAL = """model-written code cannot be isolated here, so it is not run.
{reasons}
What helps:
- Ubuntu 24.04 and later: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0
- Debian 10 and earlier: sudo sysctl kernel.unprivileged_userns_clone=1
- user.max_user_namespaces must not be 0 (sysctl user.max_user_namespaces)
- in Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined --cap-add SYS_ADMIN
- Linux 5.12 or newer; inside a chroot only root can make namespaces
`posttrain doctor` shows what is there. To run the code with your own rights instead, which is right only for a
policy that you trust, set sandbox.type: unisolated."""


class ZygotePool:
    """Runs requests on at most `workers` zygotes, which are started when needed and kept warm.

    Safe to call from several threads. Equal requests of one call are executed once: a result is a function of the
    request, the limits and the isolation.
    """

    def __init__(self, modes: Sequence[str], workers: int) -> None:
        self._modes = modes
        self._idle: list[Zygote] = []
        self._lock = threading.Lock()
        first = self._start()
        self.isolation = first.isolation
        self._idle.append(first)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")

    def run_programs(self, requests: Sequence[ProgramRequest], limits: Limits) -> list[ProgramResult]:
        """One result per request, in order. Raises SandboxUnavailable when no zygote can be started any more."""
        distinct = list(dict.fromkeys(requests))
        results = self._threads.map(lambda request: self._run(request, limits), distinct)
        by_request = dict(zip(distinct, results, strict=True))
        return [by_request[request] for request in requests]

    def close(self) -> None:
        """End all zygotes; waits for executions that are under way."""
        self._threads.shutdown()
        while self._idle:
            self._idle.pop().close()

    def _run(self, request: ProgramRequest, limits: Limits) -> ProgramResult:
        reason = ""
        for _ in range(ATTEMPTS):
            zygote = self._take()
            try:
                observed = zygote.execute(request, limits)
            except ZygoteDied as error:
                reason = f"the sandbox's parent process failed: {error}"
                zygote.close()
                continue
            except BaseException:
                zygote.close()
                raise
            with self._lock:
                self._idle.append(zygote)
            return classify(observed, len(request.inputs), limits, zygote.isolation)
        return ProgramResult(ExecutionStatus.INFRA, (), "", "", self.isolation, reason)

    def _take(self) -> Zygote:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._start()

    def _start(self) -> Zygote:
        reasons = []
        for mode in self._modes:
            try:
                zygote = Zygote(mode)
            except SandboxUnavailable as error:
                reasons.append(f"  {mode}: {error}")
            else:
                self._modes = (mode,)
                return zygote
        raise SandboxUnavailable(_REFUSAL.format(reasons="\n".join(reasons)))


class EmbeddedSandbox(ZygotePool):
    """Each execution in fresh user, mount, pid, network, ipc and uts namespaces (protocol: `Sandbox`).

    The ways in are tried in order: as the holder of CAP_SYS_ADMIN, then through an unprivileged user namespace.
    Raises SandboxUnavailable, with what to do, where neither works.
    """

    def __init__(self, workers: int = 2) -> None:
        super().__init__(MODES, workers)
