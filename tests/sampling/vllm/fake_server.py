"""A fake vLLM server: `/v1/completions` with streaming over HTTP, answered by a made-up policy, with faults on demand.

The policy emits tokens that are a hash of policy version, prompt, seed and position, so that an answer is the same
wherever it is made, and tells of the version that it was made by.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from posttrain_core.errors import SamplerUnavailable
from posttrain_core.sampling.protocol import Probe

VOCABULARY = range(4, 47)  # of the tiny policies' tokenizer, without special tokens
END_ID = 2
Say = Callable[[dict[str, Any], int], int]  # body of the request and position to the token there
Edit = Callable[[dict[str, Any]], None]  # damages an event's choice


def hashed(body: dict[str, Any], position: int) -> int:
    """About one token in 20 is the end."""
    text = json.dumps([body["version"], body["prompt"], body["seed"] if body["temperature"] else 0, position])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return END_ID if number % 20 == 0 else VOCABULARY[number % len(VOCABULARY)]


class FakeServer:
    """As a `Server` of its own process: listens from `bring_to` until it is lost. Attributes say what it does wrong.

    seen        bodies of all requests, in order, with the `version` that each is answered by
    open        requests being answered now; `most_open` at once so far, and the sets of seeds that were open together
    brought     versions that were loaded
    proved      how often it proved what it held already
    """

    def __init__(self, name: str = "fake", context_length: int = 4096) -> None:
        self.name, self.held, self.context_length = name, None, 0
        self.its_context_length = context_length
        self.version: int | None = None  # what it samples from, whatever `held` says
        self.sleeps = False
        self.proved = 0
        self.hangs_when_brought = False
        self.http = httpx.AsyncClient(timeout=None)
        self.say: Say = hashed
        self.tokens_per_event = 3
        self.seconds_per_event = 0.0
        self.seen: list[dict[str, Any]] = []
        self.open: dict[int, dict[str, Any]] = {}
        self.most_open = 0
        self.together: list[set[int]] = []
        self.brought: list[int] = []
        self.losses: list[str] = []
        self.refuse_to_start = 0  # so many times; -1: always
        self.die_at_event: Callable[[dict[str, Any]], int | None] = lambda body: None  # the whole server, at that event
        # faults until it is lost for the first time
        self.hang_at_event: int | None = None
        self.status = 200
        self.drop_at_event: int | None = None  # only that connection
        self.edit: Edit | None = None
        self.raw: bytes | None = None  # sent instead of events
        self._server: asyncio.Server | None = None
        self._handlers: dict[Any, asyncio.StreamWriter] = {}
        self._numbers = itertools.count()

    async def bring_to(self, version: int, folder: Path, probes: Sequence[Probe]) -> None:
        held, self.held = self.held, None
        async with asyncio.timeout(10):  # as a swap waits for requests in flight, which must have been taken back
            while self.open:
                await asyncio.sleep(0.001)
        while self.hangs_when_brought:
            await asyncio.sleep(0.001)
        if self.refuse_to_start:
            self.refuse_to_start -= 1
            raise SamplerUnavailable(f"{self.name} does not start")
        if self._server is None:
            self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
            self.http.base_url = httpx.URL(f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}")
            held = None
        if held == (version, folder):
            if self.version != version:
                raise SamplerUnavailable(f"{self.name} reports that it holds nothing")
            self.proved += 1
        else:
            self.brought.append(version)
        self.version = version
        self.context_length = self.its_context_length
        self.held = (version, folder)

    def lost(self, reason: str) -> None:
        self.held = None
        self.losses.append(reason)
        self.die()

    def die(self) -> None:
        """As SIGKILL does: connections end at once, further ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task, writer in self._handlers.items():
            writer.transport.abort()
            if task is not asyncio.current_task():
                task.cancel()
        self.open.clear()

    def restart(self) -> None:
        """As somebody does who starts it anew while nothing is under way."""
        self.version = None

    async def release(self) -> None:
        assert self.sleeps
        self.held = None

    async def close(self) -> None:
        self.die()
        await self.http.aclose()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handlers[asyncio.current_task()] = writer
        number = next(self._numbers)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            body["version"] = self.version
            self.seen.append(body)
            self.open[number] = body
            self.most_open = max(self.most_open, len(self.open))
            self.together.append({each["seed"] for each in self.open.values()})
            await self._answer(body, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open.pop(number, None)
            del self._handlers[asyncio.current_task()]
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        faulty = not self.losses
        status = self.status if faulty else 200
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n".encode())
        if status != 200:
            writer.write(b'{"error": {"message": "made-up refusal"}}')
            await writer.drain()
            return
        if faulty and self.raw is not None:
            writer.write(self.raw)
            await writer.drain()
            return
        for index, choice in enumerate(self._choices(body)):
            if self.die_at_event(body) == index:
                self.die()
            if faulty and index == self.hang_at_event:
                await asyncio.sleep(3600)
            if faulty and index == self.drop_at_event:
                writer.transport.abort()
            if faulty and self.edit is not None:
                self.edit(choice)
            await asyncio.sleep(self.seconds_per_event)
            if writer.transport.is_closing():
                raise ConnectionResetError
            writer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    def _choices(self, body: dict[str, Any]) -> Any:
        ids: list[int] = []
        for position in range(body["max_tokens"]):
            ids.append(self.say(body, position))
            ended = ids[-1] in body["stop_token_ids"]
            finish = "stop" if ended else "length" if position + 1 == body["max_tokens"] else None
            if finish or position == 0 or len(ids) == self.tokens_per_event:
                logprobs = [-math.log(2 + token) for token in ids]
                yield {
                    "token_ids": ids,
                    "logprobs": {"token_logprobs": logprobs},
                    "finish_reason": finish,
                    "stop_reason": ids[-1] if ended else None,
                }
                ids = []
            if finish:
                return
