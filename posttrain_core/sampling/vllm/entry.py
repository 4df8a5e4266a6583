"""What a vLLM server process of ours runs: vLLM's API server, which ends with the process that started it.

    python entry.py PARENT_PID ARGUMENTS_OF_VLLM...

It is copied to a folder of its own and imports nothing of posttrain: vLLM has an environment of its own. The processes
that vLLM starts (engine core, workers) import this file as `__mp_main__`, so each of them watches its parent. One that
finds itself without its parent kills the whole process group.
"""

import contextlib
import hashlib
import hmac
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

PARENT_CHECK_SECONDS = 0.5
TEMPORARY_FOLDER = "POSTTRAIN_VLLM_TEMPORARY_FOLDER"  # variable that names it; removed at the end

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class KeyGuard:
    """ASGI middleware: every path wants the API key. vLLM asks for it under /v1 only, not where weights are swapped."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = _digest(f"Bearer {os.environ['VLLM_API_KEY']}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._knows_key(scope):
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)

    def _knows_key(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(_digest(given), self._expected)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def kill_group(group: int) -> None:
    """SIGKILL for every process of the group except the caller and multiprocessing's resource tracker.

    The tracker ends by itself once the others are gone, and removes the shared memory that they leave behind. (It
    ignores SIGTERM.)
    """
    for pid in members(group) - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def members(group: int) -> set[int]:
    """Living processes of the group, without the resource tracker."""
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            is_tracker = b"multiprocessing.resource_tracker" in (folder / "cmdline").read_bytes()
            if int(its_group) == group and state != "Z" and not is_tracker:
                found.add(int(folder.name))
    return found


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    shutil.rmtree(os.environ[TEMPORARY_FOLDER], ignore_errors=True)
    kill_group(os.getpgrp())
    os.kill(os.getpid(), signal.SIGKILL)


def _start_watch(parent: int) -> None:
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


if __name__ == "__mp_main__":
    starter = os.getppid()  # in the same group; one that is not has taken over a process whose parent is gone
    _start_watch(starter if os.getpgid(starter) == os.getpgrp() else 0)

if __name__ == "__main__":
    _start_watch(int(sys.argv.pop(1)))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
