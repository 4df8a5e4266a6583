"""One vLLM server: started when it is ours, swapped to a policy version in place, proved, watched."""

import asyncio
import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import httpx

from posttrain_core.config import VllmLaunchConfig, VllmSamplerConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.sampling.protocol import Probe
from posttrain_core.sampling.vllm.control import Control, ControlFault
from posttrain_core.sampling.vllm.process import ServerProcess, start_process
from posttrain_core.sampling.vllm.shared_folder import SharedFolder
from posttrain_core.sampling.vllm.worker_extension import weight_files, weights_digest

TOLERANCE = {"float32": 0.005, "bfloat16": 0.3}
MIN_LOAD_BYTES_PER_SECOND = 20e6  # a swap slower than that counts as hung
START_POLL_SECONDS = 0.2
CONNECT_SECONDS = 10.0
MANUAL = "docs/vllm.md says how such a server is started"


def servers(config: VllmSamplerConfig, dtype: str, scratch: Path) -> "list[Server]":
    """One for each URL, or those of `launch`; none is started yet.

    `dtype` is the precision of the weights ("float32", "bfloat16"); logs and what the processes run go to `scratch`.
    """
    if config.url:
        shared = SharedFolder(Path(config.shared_folder)) if config.shared_folder else None
        api_key = os.environ.get(config.api_key_env, "")
        return [UserServer(config, dtype, url, api_key, shared) for url in config.url]
    launch = config.launch or VllmLaunchConfig()
    return [OwnServer(config, dtype, launch, index, scratch) for index in range(launch.num_servers)]


class Server(ABC):
    """Used from one asyncio loop.

    `held` is what the server was proved to hold; None: nothing may be sampled from it.
    """

    name: str  # for messages: the URL, or "vLLM server 0"
    http: httpx.AsyncClient  # base_url and API key set, no total timeout; of the running process
    held: tuple[int, Path] | None
    context_length: int  # once something is held

    def __init__(self, config: VllmSamplerConfig, dtype: str, name: str, trust_env: bool = True) -> None:
        self.name, self.held, self.context_length = name, None, 0
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=trust_env,
        )
        self._control = Control(self.http)
        self._stall_seconds = config.stall_seconds
        self._tolerance = config.probe_tolerance or TOLERANCE[dtype]
        self._asleep = False
        self._digest = ""  # of what is held

    @property
    def sleeps(self) -> bool:
        """Whether `release` has something to do."""
        return False

    async def bring_to(self, version: int, folder: Path, probes: Sequence[Probe]) -> None:
        """Start the server when it is ours and does not run, swap the weights, drop all cached state, prove it.

        What is held already is proved again and not loaded again. Requests in flight must have ended. Raises
        SamplerUnavailable, with `held` None.
        """
        held, self.held = self.held, None
        try:
            if held != (version, folder):
                self._digest = await asyncio.to_thread(weights_digest, folder)
            digest = self._digest
            started = await self._make_ready(folder)
            if started or held != (version, folder):
                await self._swap(version, await self._place(version, folder, digest))
            await self._prove(version, digest, probes)
        except OSError as error:
            raise SamplerUnavailable(f"{self.name} cannot be given policy version {version}: {error}") from error
        except ControlFault as fault:
            message = f"{self.name} failed while it was brought to policy version {version}: {fault}"
            raise SamplerUnavailable(f"{message}{self._given_up()}") from fault
        self.held = (version, folder)

    @abstractmethod
    def lost(self, reason: str) -> None:
        """It died, hung or answered nonsense: `held` becomes None. A process of ours is killed, and the next
        `bring_to` starts another."""

    @abstractmethod
    async def release(self) -> None:
        """Let the server sleep where `launch.sleep_while_training` asks for it; `held` becomes None then.

        Raises SamplerUnavailable where it does not; a process of ours is killed then."""

    @abstractmethod
    async def close(self) -> None:
        """A process of ours is gone afterwards."""

    @abstractmethod
    async def _make_ready(self, folder: Path) -> bool:
        """The server answers control calls afterwards, and `context_length` is known. True when it was started."""

    @abstractmethod
    async def _place(self, version: int, folder: Path, digest: str) -> Path:
        """Where the server finds the weights."""

    @abstractmethod
    def _given_up(self) -> str:
        """Called when a control call failed; what there is to say about it."""

    async def _swap(self, version: int, place: Path) -> None:
        num_bytes = sum(path.stat().st_size for path in weight_files(place))
        try:
            await self._control.pause()
            if self._asleep:
                await self._control.wake("weights")
            answers = await self._control.swap(
                version, str(place), self._stall_seconds + num_bytes / MIN_LOAD_BYTES_PER_SECOND
            )
            if self._asleep:
                await self._control.wake("kv_cache")
            self._asleep = False
            await self._control.drop_caches()
        finally:
            with contextlib.suppress(ControlFault):  # one that cannot resume fails its proof
                await self._control.resume()
        for answer in answers:
            if "broken" in answer:
                raise ControlFault(answer["broken"])
            if "refused" in answer:
                raise SamplerUnavailable(f"{self.name} refused policy version {version}: {answer['refused']}")

    async def _prove(self, version: int, digest: str, probes: Sequence[Probe]) -> None:
        """By what the workers report and by the log-probabilities of the probe tokens."""
        expected = {"version": str(version), "digest": digest}
        for held in await self._control.held():
            if held != expected:
                raise SamplerUnavailable(f"{self.name} reports that it holds {held or 'nothing'}, not {expected}")
        found = await asyncio.gather(*(self._probe(probe) for probe in probes))
        if probes and not any(found):
            raise SamplerUnavailable(f"no probe fits the context of {self.name}, {self.context_length} tokens")
        for probe, logprobs in zip(probes, found, strict=True):
            for index, (measured, stored) in enumerate(zip(logprobs, probe.logprobs, strict=False)):
                if not abs(measured - stored) <= self._tolerance:
                    raise SamplerUnavailable(
                        f"{self.name} does not sample from policy version {version}: it gives the probe's token "
                        f"{probe.response_ids[index]} (number {index}) a log-probability of {measured:.4f}, the policy "
                        f"{stored:.4f} (sampler.probe_tolerance is {self._tolerance:g})"
                    )

    async def _probe(self, probe: Probe) -> list[float]:
        """Of the response tokens that fit: a prompt must leave room for a token."""
        token_ids = [*probe.prompt_ids, *probe.response_ids][: self.context_length - 1]
        logprobs = await self._control.token_logprobs(token_ids)
        return logprobs[len(probe.prompt_ids) - 1 :]


class OwnServer(Server):
    """A process of ours. The first `bring_to` starts it, and so does the next one after it was lost."""

    def __init__(
        self, config: VllmSamplerConfig, dtype: str, launch: VllmLaunchConfig, index: int, scratch: Path
    ) -> None:
        super().__init__(config, dtype, f"vLLM server {index}", trust_env=False)  # no proxy on the way to this machine
        self._launch, self._dtype, self._index, self._scratch = launch, dtype, index, scratch
        self._process: ServerProcess | None = None
        self._killed: list[ServerProcess] = []

    @property
    def pid(self) -> int | None:
        """Of the API server, whose process group holds all others; None when there is no process."""
        return self._process.popen.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.alive

    def lost(self, reason: str) -> None:
        self.held = None
        if self._process is not None:
            self._process.kill()
            self._killed.append(self._process)
        self._process = None

    @property
    def sleeps(self) -> bool:
        return self._launch.sleep_while_training and not (self._process is not None and self._process.on_cpu)

    async def release(self) -> None:
        if not self.sleeps or self._process is None or self._asleep:
            return
        self.held = None
        try:
            await self._control.sleep()
        except ControlFault as fault:
            message = f"{self.name} does not go to sleep: {fault}{self._given_up()}"
            try:
                await self._bury()  # so that its memory is free
            except OSError as error:
                message = f"{message}; {error}"
            raise SamplerUnavailable(message) from fault
        self._asleep = True

    async def close(self) -> None:
        self.held = None
        process, self._process = self._process, None
        try:
            if process is not None:
                await asyncio.to_thread(process.stop)
            await self._bury()
        finally:
            await self.http.aclose()

    async def _make_ready(self, folder: Path) -> bool:
        if self._process is not None and not self._process.alive:
            self.lost("it ended")
        if self._process is not None:
            return False
        await self._bury()
        process = self._process = await self._start_process(folder)
        self._asleep = False
        self.http.base_url = httpx.URL(process.url)
        self.http.headers["Authorization"] = f"Bearer {process.api_key}"
        try:
            await self._started(process)
            self.context_length = await self._control.context_length()
        except BaseException:
            self.lost("it did not start")
            raise
        return True

    async def _start_process(self, folder: Path) -> ServerProcess:
        starting = asyncio.create_task(
            asyncio.to_thread(start_process, self._launch, self._index, folder, self._dtype, self._scratch, self.name)
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # the thread goes on, and its process must not be forgotten
            self._process = await starting
            self.lost("its start was cancelled")
            raise

    async def _bury(self) -> None:
        """Killed processes are gone afterwards; on a GPU that takes a while, and its memory is needed."""
        for process in tuple(self._killed):
            await asyncio.to_thread(process.wait_until_gone)
            self._killed.remove(process)

    async def _started(self, process: ServerProcess) -> None:
        seen, since = -1, time.monotonic()
        while not await self._control.healthy():
            size = process.log_size()
            if not process.alive:
                raise SamplerUnavailable(
                    f"{self.name} did not start: it {process.how_it_ended()}; {process.log_tail()}"
                )
            if size != seen:
                seen, since = size, time.monotonic()
            elif time.monotonic() - since > self._launch.stall_seconds:
                raise SamplerUnavailable(
                    f"{self.name} did not start: its log did not grow for {self._launch.stall_seconds:g} seconds "
                    f"(sampler.launch.stall_seconds); {process.log_tail()}"
                )
            await asyncio.sleep(START_POLL_SECONDS)

    async def _place(self, version: int, folder: Path, digest: str) -> Path:
        return folder.absolute()

    def _given_up(self) -> str:
        process = self._process
        self.lost("a control call failed")
        return f"; {process.log_tail()}" if process is not None else ""


class UserServer(Server):
    """A server that somebody else runs, perhaps elsewhere."""

    def __init__(
        self, config: VllmSamplerConfig, dtype: str, url: str, api_key: str, shared: SharedFolder | None
    ) -> None:
        super().__init__(config, dtype, url)
        self.http.base_url = httpx.URL(url)
        if api_key:
            self.http.headers["Authorization"] = f"Bearer {api_key}"
        self._api_key_env = config.api_key_env
        self._shared = shared

    def lost(self, reason: str) -> None:
        self.held = None

    async def release(self) -> None:
        return

    async def close(self) -> None:
        self.held = None
        await self.http.aclose()

    async def _make_ready(self, folder: Path) -> bool:
        """Looks at how the server was started: a call of a method that its workers lack would end its engine.

        Each time, because somebody may have restarted it otherwise."""
        try:
            self.context_length = await self._control.context_length()
            extension = await self._control.worker_extension()
        except ControlFault as fault:
            raise SamplerUnavailable(f"{self.name} cannot be used: {self._explained(fault)}") from fault
        if extension.rpartition(".")[2] != "WeightSwap":
            raise SamplerUnavailable(
                f"{self.name} cannot be used: it was started without "
                f"--worker-extension-cls worker_extension.WeightSwap; {MANUAL}"
            )
        return False

    def _explained(self, fault: ControlFault) -> str:
        if fault.status == httpx.codes.UNAUTHORIZED:
            return f"it wants an API key, or another one than the environment variable {self._api_key_env} holds"
        if fault.status == httpx.codes.NOT_FOUND:
            return f"it runs without VLLM_SERVER_DEV_MODE=1 ({fault}); {MANUAL}"
        return str(fault)

    async def _place(self, version: int, folder: Path, digest: str) -> Path:
        if self._shared is None:
            return folder.absolute()
        return await self._shared.put(version, folder, digest)

    def _given_up(self) -> str:
        self.lost("a control call failed")
        return ""
