"""Requests over servers that may die: each is answered once, whatever becomes of the servers.

A server is *lost* when a connection to it fails, when it answers with a fault or nonsense, or when it gives no token to
any of its requests for `stall_seconds`. Its unfinished requests start anew elsewhere (`placement`). In the background
it is brought up again, with growing pauses, and takes requests once it is proved. After `ATTEMPTS` failures it is given
up until the next `load`. A server without requests proves again at each `load`: it may have been restarted meanwhile.

A request that was under way on `SUSPICIOUS` servers when they were lost may be what they died of. It gets the next idle
server to itself, and when that one is lost too, its caller is told.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from posttrain_core.errors import SamplerUnavailable
from posttrain_core.sampling.protocol import Completion, OnDone, Probe, SampleRequest
from posttrain_core.sampling.vllm.completions import OnTokens, RequestRefused, ServerFault
from posttrain_core.sampling.vllm.placement import Job, Lane, Waiting, lightest
from posttrain_core.sampling.vllm.server import Server

SUSPICIOUS = 3
ATTEMPTS = 8
FIRST_PAUSE_SECONDS = 1.0  # before the second attempt to bring a server up; doubles each time
LONGEST_PAUSE_SECONDS = 30.0
GRACE_SECONDS = 5.0  # that a load waits for other servers once one is ready, at least
MAX_NOTE_CHARACTERS = 300
TICKS = 10  # looks at a server's progress in `stall_seconds`; counted, so that a pause of this process is not its fault

Complete = Callable[[Server, SampleRequest, OnTokens], Awaitable[Completion]]
Note = Callable[[str], None]
Policy = tuple[int, Path]


class _ServerLane(Lane):
    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.tasks: dict[Job, asyncio.Task[None]] = {}
        self.silent_ticks = 0
        self.bringing = asyncio.Lock()  # held while the server is brought to a version
        self.revival: asyncio.Task[None] | None = None
        self.fault = "it was not started"
        self.told = False  # that it is lost

    @property
    def reviving(self) -> bool:
        return self.revival is not None and not self.revival.done()


class Dispatcher:
    """Lives in one asyncio loop. `complete` makes a completion on a server; `note` is told what becomes of servers."""

    def __init__(
        self,
        servers: Sequence[Server],
        complete: Complete,
        *,
        requests_per_server: int,
        stall_seconds: float,
        note: Note | None = None,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._lanes = [_ServerLane(server) for server in servers]
        self._complete = complete
        self._requests_per_server = requests_per_server
        self._stall_seconds = stall_seconds
        self._note = note
        self._first_pause_seconds = first_pause_seconds
        self._grace_seconds = grace_seconds
        self._policy: Policy | None = None
        self._target: Policy | None = None  # what servers are brought to; `_policy` once one of them holds it
        self._context_length: int | None = None
        self._probes: Sequence[Probe] = ()
        self._waiting = Waiting()
        self._loading = asyncio.Lock()
        self._turn = asyncio.Condition()  # of what follows
        self._num_calls = 0  # of `sample`, under way
        self._changing = False  # the version
        self._watch: asyncio.Task[None] | None = None

    @property
    def context_length(self) -> int:
        """The smallest one of the servers that the first load left in use. Raises SamplerUnavailable before it."""
        if self._context_length is None:
            raise SamplerUnavailable("the sampler holds no policy: call load_policy first")
        return self._context_length

    async def load(self, version: int, folder: Path, probes: Sequence[Probe]) -> None:
        """All servers to the version, at once, when no request is under way. Those that succeed are used.

        Once one has, the others get as long again; those that are slower are left to the background. Where the version
        is held, servers without requests prove it again, and lost ones are tried again. Raises SamplerUnavailable when
        no server holds it.
        """
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_progress())
        if self._policy != (version, folder) or self._changing:
            async with self._loading:
                if self._policy != (version, folder):
                    await self._change((version, folder), probes)
                    return
        await self._mend((version, folder))

    async def sample(self, requests: Sequence[SampleRequest], on_done: OnDone) -> None:
        """Tells `on_done` of each request. When it raises or is cancelled, what is left of the requests is given up."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._changing)
            if self._policy is None:
                raise SamplerUnavailable("the sampler holds no policy: call load_policy first")
            self._num_calls += 1
        answers: asyncio.Queue[tuple[int, Completion | Exception]] = asyncio.Queue()

        def tell(index: int, answer: Completion | Exception) -> None:
            answers.put_nowait((index, answer))

        jobs = [Job(request, partial(tell, index)) for index, request in enumerate(requests)]
        try:
            for job in jobs:
                self._waiting.put(job)
            self._place()
            self._answer_hopeless()
            for _ in jobs:
                index, answer = await answers.get()
                if isinstance(answer, Exception):
                    raise answer
                on_done(index, answer)
        finally:
            await self._give_up(set(jobs))
            async with self._turn:
                self._num_calls -= 1
                self._turn.notify_all()

    async def release(self) -> None:
        """Servers that sleep hold nothing then, and the next `load` wakes them. One that fails to sleep is lost."""
        sleepers = [lane for lane in self._lanes if lane.server.sleeps]
        if not sleepers:
            return
        async with self._loading, self._nothing_under_way():
            await asyncio.gather(*(self._put_to_sleep(lane) for lane in sleepers))

    async def close(self) -> None:
        """Nothing else of this object may run any more."""
        for result in await asyncio.gather(*(lane.server.close() for lane in self._lanes), return_exceptions=True):
            if isinstance(result, BaseException):
                self._say(f"a vLLM server could not be closed: {result}")

    # --- versions -------------------------------------------------------------------------------------------------

    async def _change(self, policy: Policy, probes: Sequence[Probe]) -> None:
        async with self._nothing_under_way():
            self._policy, self._target, self._probes = None, policy, probes
            for lane in self._lanes:
                lane.capacity, lane.revival = 0, None  # a revival ends when it sees another target
            begun = time.monotonic()
            attempts = {lane: asyncio.create_task(self._bring(lane, policy)) for lane in self._lanes}
            pending = set(attempts.values())
            while pending and not any(lane.capacity for lane in self._lanes):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            await self._wait_for_others(pending, begun)
            ready = [lane for lane in self._lanes if lane.capacity]
            if not ready:
                raise SamplerUnavailable(f"no vLLM server holds policy version {policy[0]}: {self._faults()}")
            if self._context_length is None:
                self._context_length = min(lane.server.context_length for lane in ready)
            self._policy = policy
            for lane, attempt in attempts.items():
                if not attempt.done():
                    self._fail(lane, f"{lane.server.name} is slow to hold policy version {policy[0]}: it is left out")
                if not lane.capacity:
                    lane.revival = asyncio.create_task(self._revive(lane, policy, [attempt]))

    async def _wait_for_others(self, attempts: Collection[asyncio.Task[None]], begun: float) -> None:
        """One server has become ready since `begun`: the others get as long again, and the grace at least."""
        if attempts:
            await asyncio.wait(attempts, timeout=max(self._grace_seconds, time.monotonic() - begun))

    @asynccontextmanager
    async def _nothing_under_way(self) -> AsyncIterator[None]:
        """Entered when no request is, and none begins until it is left."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._num_calls)
            self._changing = True
        try:
            yield
        finally:
            self._changing = False
            async with self._turn:
                self._turn.notify_all()

    async def _mend(self, policy: Policy) -> None:
        """Idle servers prove again what they hold: each request has a connection of its own, so that a server which was
        restarted meanwhile, with other weights, would go unnoticed."""
        begun, proofs = time.monotonic(), []
        for lane in self._lanes:
            if lane.jobs or lane.reviving:
                continue
            attempts = []
            if lane.capacity:
                lane.capacity = 0
                attempts = [asyncio.create_task(self._bring(lane, policy))]
            proofs += attempts
            lane.revival = asyncio.create_task(self._revive(lane, policy, attempts))
        while not any(lane.capacity for lane in self._lanes):
            revivals = [lane.revival for lane in self._lanes if lane.revival is not None and lane.reviving]
            if not revivals:
                raise SamplerUnavailable(f"every vLLM server is lost: {self._faults()}")
            await asyncio.wait(revivals, return_when=asyncio.FIRST_COMPLETED)
        await self._wait_for_others(proofs, begun)

    async def _bring(self, lane: _ServerLane, policy: Policy) -> None:
        """The lane has capacity when it succeeded."""
        server = lane.server
        async with lane.bringing:
            if lane.capacity or policy != self._target:
                return
            try:
                await server.bring_to(*policy, self._probes)
            except SamplerUnavailable as error:
                self._fail(lane, str(error))
                return
            except asyncio.CancelledError:
                server.lost("interrupted while it was brought to a policy version")
                raise
            except Exception as error:  # of ours, but requests wait for this server
                self._fail(lane, f"{server.name} could not be brought to a policy version: {error!r}")
                server.lost(lane.fault)
                return
            if policy != self._target:
                return
            if server.context_length < (self._context_length or 0):
                self._fail(
                    lane,
                    f"{server.name} has a context of {server.context_length} tokens, and requests may have "
                    f"{self._context_length}, which the first load found: start it with --max-model-len "
                    f"{self._context_length}",
                )
                return
            lane.capacity, lane.silent_ticks = self._requests_per_server, 0
            if lane.told:
                self._say(f"{server.name} is back, with policy version {policy[0]}")
                lane.told = False

    async def _revive(self, lane: _ServerLane, policy: Policy, before: Sequence[asyncio.Task[None]]) -> None:
        """Once the tasks `before` have ended; one of them may have brought the server up."""
        if before:
            await asyncio.wait(before)
        pause = 0.0
        for _ in range(ATTEMPTS):
            await asyncio.sleep(pause)
            if policy != self._target:
                return
            await self._bring(lane, policy)
            if lane.capacity:
                self._place()
                return
            pause = min(LONGEST_PAUSE_SECONDS, max(self._first_pause_seconds, 2 * pause))
        lane.revival = None
        self._answer_hopeless()

    async def _put_to_sleep(self, lane: _ServerLane) -> None:
        async with lane.bringing:  # a server that is being brought up is not interrupted
            if lane.revival is not None:
                lane.revival.cancel()
            lane.capacity, lane.fault = 0, "it was released"
            try:
                await lane.server.release()
            except SamplerUnavailable as error:
                self._fail(lane, str(error))

    def _fail(self, lane: _ServerLane, fault: str) -> None:
        """The reason why the lane has no capacity; told once, until the server is back."""
        lane.fault = fault
        if not lane.told:
            lane.told = True
            self._say(fault)

    def _say(self, text: str) -> None:
        if self._note is not None:
            self._note(" ".join(text.split())[:MAX_NOTE_CHARACTERS])

    def _faults(self) -> str:
        return "; ".join(dict.fromkeys(lane.fault for lane in self._lanes))

    # --- requests -------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        while (lane := lightest(self._lanes)) is not None and (job := self._waiting.take(lane)) is not None:
            if not lane.jobs:
                lane.silent_ticks = 0
            lane.give(job)
            lane.tasks[job] = asyncio.create_task(self._run(lane, job))

    async def _run(self, lane: _ServerLane, job: Job) -> None:
        def on_tokens(num_tokens: int) -> None:
            lane.silent_ticks = 0
            lane.advance(job, num_tokens)

        try:
            answer: Completion | Exception = await self._complete(lane.server, job.request, on_tokens)
        except ServerFault as fault:
            self._lose(lane, str(fault))
            return
        except RequestRefused as refusal:
            answer = SamplerUnavailable(f"{lane.server.name} refused {_described(job.request)}: {refusal}")
        except Exception as error:
            answer = error
        lane.drop(job)
        del lane.tasks[job]
        job.answer(answer)
        self._place()

    def _lose(self, lane: _ServerLane, reason: str) -> None:
        if not lane.capacity:
            return  # the first of its requests to notice has said so
        lane.capacity = 0
        self._fail(lane, f"{lane.server.name} was lost: {reason}")
        lane.server.lost(reason)
        self._waiting.forget(lane)
        tasks = self._cancelled(lane, set(lane.jobs))
        num_suspects = 0
        for job in list(lane.jobs):
            lane.drop(job)
            job.losses.append(lane.fault)
            if job.suspect:
                self._answer({job}, _killer(job))
                continue
            job.suspect = len(job.losses) >= SUSPICIOUS
            num_suspects += job.suspect
            self._waiting.put(job)
        if num_suspects:
            self._say(
                f"{num_suspects} requests were on {SUSPICIOUS} vLLM servers that were lost: each is run alone now"
            )
        if self._policy is not None:
            lane.revival = asyncio.create_task(self._revive(lane, self._policy, tasks))
        self._place()

    async def _give_up(self, jobs: set[Job]) -> None:
        """Streams of requests under way are closed when it returns."""
        self._waiting.remove(jobs)
        tasks = []
        for lane in self._lanes:
            unwanted = lane.jobs & jobs
            tasks += self._cancelled(lane, unwanted)
            for job in unwanted:
                lane.drop(job)
        self._place()
        if tasks:
            await asyncio.wait(tasks)

    @staticmethod
    def _cancelled(lane: _ServerLane, jobs: set[Job]) -> list[asyncio.Task[None]]:
        """The tasks of those jobs, but for the one that asks."""
        tasks = [lane.tasks.pop(job) for job in jobs]
        others = [task for task in tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        return others

    def _answer(self, jobs: set[Job], error: Exception) -> None:
        self._waiting.remove(jobs)
        for job in jobs:
            job.answer(error)

    def _answer_hopeless(self) -> None:
        """What waits for servers that are all given up."""
        if not any(lane.capacity or lane.reviving for lane in self._lanes):
            self._answer(self._waiting.all(), SamplerUnavailable(f"every vLLM server is lost: {self._faults()}"))

    async def _watch_progress(self) -> None:
        while True:
            await asyncio.sleep(self._stall_seconds / TICKS)
            for lane in self._lanes:
                lane.silent_ticks += 1
                if lane.jobs and lane.silent_ticks > TICKS:
                    self._lose(
                        lane,
                        f"it gave no token to any of {len(lane.jobs)} requests for {self._stall_seconds:g} seconds "
                        "(sampler.stall_seconds)",
                    )


def _killer(job: Job) -> SamplerUnavailable:
    return SamplerUnavailable(
        f"{len(job.losses)} vLLM servers in a row were lost while they worked on {_described(job.request)}, the last "
        f"time on it alone: {job.losses[-1]}"
    )


def _described(request: SampleRequest) -> str:
    return (
        f"the request with seed {request.seed}, {len(request.prompt_ids)} prompt tokens, {request.max_new_tokens} new "
        f"ones at most and temperature {request.temperature:g}"
    )
