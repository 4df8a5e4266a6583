"""VllmSampler: the `Sampler` protocol over vLLM servers, in an asyncio loop of its own that runs in one thread."""

import asyncio
import queue
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from posttrain_core.config import VllmSamplerConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.records import FinishReason, Message
from posttrain_core.sampling.protocol import Completion, OnDone, Probe, SampleRequest
from posttrain_core.sampling.tokenizer import PolicyTokenizer
from posttrain_core.sampling.vllm import server
from posttrain_core.sampling.vllm.completions import OnTokens, complete
from posttrain_core.sampling.vllm.dispatch import Dispatcher, Note

Answer = TypeVar("Answer")


class VllmSampler:
    """A `Sampler`. Calls from several threads share the servers; `on_done` is called in the thread that samples.

    `dtype` names the precision of the weights ("float32", "bfloat16"). `servers`: default, those of `config`. `note` is
    told, from another thread and in one line each, of servers that are lost and back.
    """

    def __init__(
        self,
        config: VllmSamplerConfig,
        dtype: str,
        scratch: Path,
        servers: Sequence[server.Server] | None = None,
        note: Note | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-sampler", daemon=True)
        self._thread.start()
        self._dispatcher = Dispatcher(
            server.servers(config, dtype, scratch) if servers is None else servers,
            self._complete,
            requests_per_server=config.requests_per_server,
            stall_seconds=config.stall_seconds,
            note=note,
        )
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: PolicyTokenizer | None = None
        self._close_lock = threading.Lock()
        self._submit_lock = threading.Lock()
        self._closing = False

    def load_policy(self, version: int, folder: Path, probes: Sequence[Probe] = ()) -> None:
        """Waits until nothing is under way under another version. Servers that cannot be brought to this one are left
        out and tried again in the background."""
        if not any(folder.glob("*.safetensors")):
            raise SamplerUnavailable(f"policy version {version}: there are no weights (safetensors) in {folder}")
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(version, folder)
        self._wait(self._dispatcher.load(version, folder, probes))

    @property
    def context_length(self) -> int:
        """The smaller one of the policy's and the servers'."""
        return min(self._loaded().context_length, self._dispatcher.context_length)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._loaded().encode(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._loaded().decode(token_ids)

    def sample(self, requests: Sequence[SampleRequest], on_done: OnDone | None = None) -> list[Completion]:
        """`max_new_tokens` is clipped to the context; a prompt that leaves no room is refused, with no tokens.

        An exception in this thread (of `on_done`, KeyboardInterrupt) takes the requests back from the servers.
        """
        context_length = self.context_length
        completions = [Completion((), (), FinishReason.REFUSED)] * len(requests)
        asked = []
        for index, request in enumerate(requests):
            room = min(request.max_new_tokens, context_length - len(request.prompt_ids))
            if room > 0 and request.prompt_ids:
                asked.append((index, replace(request, max_new_tokens=room)))
            elif on_done is not None:
                on_done(index, completions[index])
        done: queue.SimpleQueue[tuple[int, Completion] | None] = queue.SimpleQueue()

        def put(place: int, completion: Completion) -> None:
            done.put((asked[place][0], completion))

        sampling = self._submit(self._dispatcher.sample([request for _, request in asked], put))
        sampling.add_done_callback(lambda _: done.put(None))
        try:
            while (item := done.get()) is not None:
                index, completion = item
                completions[index] = completion
                if on_done is not None:
                    on_done(index, completion)
        finally:
            sampling.cancel()
        self._result(sampling)
        return completions

    def release(self) -> None:
        self._wait(self._dispatcher.release())

    def close(self) -> None:
        """Calls under way end with SamplerUnavailable; servers of ours are gone afterwards."""
        with self._close_lock:
            if self._loop.is_closed():
                return
            with self._submit_lock:  # all calls are in the loop now, and no other one gets there
                self._closing = True
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _shut_down(self) -> None:
        await _cancel_others()
        await self._dispatcher.close()
        await _cancel_others()
        await self._loop.shutdown_asyncgens()

    async def _complete(self, server: server.Server, request: SampleRequest, on_tokens: OnTokens) -> Completion:
        return await complete(server.http, request, self._loaded(), on_tokens)

    def _loaded(self) -> PolicyTokenizer:
        if self._tokenizer is None:
            raise SamplerUnavailable("the sampler holds no policy: call load_policy first")
        return self._tokenizer

    def _submit(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        with self._submit_lock:
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise SamplerUnavailable("the sampler is closed")

    def _wait(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """What an exception in this thread interrupts is cancelled."""
        future = self._submit(work)
        try:
            return self._result(future)
        finally:
            future.cancel()

    @staticmethod
    def _result(future: Future[Answer]) -> Answer:
        try:
            return future.result()
        except CancelledError as error:
            raise SamplerUnavailable("the sampler was closed meanwhile") from error


async def _cancel_others() -> None:
    """Tasks of this loop, and those that they begin as they end."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tokenizer(version: int, folder: Path) -> PolicyTokenizer:
    try:
        return PolicyTokenizer(folder)
    except Exception as error:  # transformers raises nearly every type
        raise SamplerUnavailable(
            f"policy version {version}: no tokenizer can be loaded from {folder} ({error}); "
            "the folder must hold config, tokenizer and safetensors of a causal LM"
        ) from error
