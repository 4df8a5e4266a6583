"""A proxy between an S3 client and its server that does harm by a seeded schedule.

    with FaultyProxy(server_port) as proxy:
        proxy.schedule = Schedule(seed=7)
        ... AWS_ENDPOINT_URL_S3=proxy.url ...

What happens to a request depends on the seed, its method, its key and how often that was asked for before; not on the
order in which several threads ask. One request per connection, which both ends are told (`Connection: close`).
"""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any


class Fault(StrEnum):
    DELAY = "delay"
    DROP = "drop"  # the server never sees the request
    LOSE = "lose"  # the server did what it was asked; the answer does not come
    LATE = "late"  # as LOSE, but the server does it only after the client has asked again
    CUT = "cut"  # a part of the answer
    ERROR = "error"  # 500, nothing done
    LIE = "lie"  # 500, but it was done
    SLOW_DOWN = "slow down"  # 503, nothing done


_NOT_DONE = {Fault.DROP, Fault.ERROR, Fault.SLOW_DOWN}
_NAMES = re.compile("[0-9a-f]{12,}")  # attempts and nonces, which differ from run to run
_PREFIX = re.compile("^/[^/]*/[^/]*/")  # bucket and store


@dataclass(frozen=True)
class Schedule:
    """Faults at `rate` of the requests."""

    seed: int = 0
    rate: float = 0.0

    def fault(self, name: str, number: int) -> tuple[Fault | None, float]:
        """What is done to the request called `name` when it comes for the `number`-th time, and how far, in [0, 1)."""
        random = Random(f"{self.seed} {name} {number}")
        fault = random.choice(list(Fault)) if random.random() < self.rate else None
        return fault, random.random()


class FaultyProxy:
    """Runs in a thread of its own. `done` counts the faults of all schedules, `journal` lists those of this one."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._schedule = Schedule()
        self._numbers: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self.done: Counter[Fault] = Counter()
        self.journal: list[str] = []

    def __enter__(self) -> "FaultyProxy":
        self._thread.start()
        start = asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._numbers = Counter()
        self.journal = []

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            try:
                request = await _read_request(reader, writer)
                answer = await self._answer(request, writer.close)
                writer.write(answer)
                await writer.drain()
            finally:
                writer.close()

    async def _answer(self, request: bytes, hang_up: Callable[[], Any]) -> bytes:
        method, path = request.split(b" ", 2)[:2]
        name = f"{method.decode()} {_NAMES.sub('*', _PREFIX.sub('', path.decode()))}"
        self._numbers[name] += 1
        fault, amount = self._schedule.fault(name, self._numbers[name])
        if fault is None:
            return await self._forward(request)
        self.done[fault] += 1
        self.journal.append(f"{name} #{self._numbers[name]}: {fault}")
        if fault in (Fault.DROP, Fault.LATE):
            hang_up()
        if fault in (Fault.DELAY, Fault.LATE):
            await asyncio.sleep(0.3 * amount)
        answer = b"" if fault in _NOT_DONE else await self._forward(request)
        if fault in (Fault.DROP, Fault.LATE, Fault.LOSE):
            return b""
        if fault is Fault.CUT:  # among the headers as often as in the body
            head = answer.index(b"\r\n\r\n")
            return answer[: int(head * 2 * amount if amount < 0.5 else head + (len(answer) - head) * (2 * amount - 1))]
        if fault in (Fault.ERROR, Fault.LIE):
            return _refusal(500, "InternalError")
        return _refusal(503, "SlowDown") if fault is Fault.SLOW_DOWN else answer

    async def _forward(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            writer.write(request)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Head and body, to be sent as they are, but for `Connection: close`."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.rstrip(b"\r\n").split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    assert b"transfer-encoding" not in headers, "trailing checksums: some servers refuse them"
    if headers.get(b"expect"):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    kept = [line for line in lines if line.partition(b":")[0].lower() not in (b"connection", b"expect")]
    body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    return b"\r\n".join([*kept, b"Connection: close", b"", body])


def _refusal(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>by schedule</Message></Error>"
    return f"HTTP/1.1 {status} {code}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
