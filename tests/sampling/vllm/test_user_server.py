"""Servers that somebody else runs, on a fake end of their control calls; and processes that do not end."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from posttrain_core.config import VllmSamplerConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.sampling.vllm import process
from posttrain_core.sampling.vllm.server import Server, servers
from posttrain_core.sampling.vllm.worker_extension import weights_digest


class FakeControl:
    """Answers control calls as a server that takes every version. `seen`: what it was asked, in order."""

    def __init__(self) -> None:
        self.extension = "worker_extension.WeightSwap"
        self.hangs_at = ""
        self.seen: list[str] = []
        self._held: dict[str, str] = {}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int((head.lower().partition("content-length:")[2] or "0").split("\r\n")[0])
            body = json.loads(await reader.readexactly(length) or b"{}")
            path = head.split()[1].partition("?")[0]
            self.seen.append(body.get("method", path))
            while self.seen[-1] == self.hangs_at:
                await asyncio.sleep(0.001)
            answer = json.dumps(self._answer(path, body)).encode()
            writer.write(b"HTTP/1.1 200 X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
            await writer.drain()
        finally:
            writer.close()

    def _answer(self, path: str, body: dict[str, list[str]]) -> object:
        if path == "/v1/models":
            return {"data": [{"max_model_len": 64}]}
        if path == "/server_info":
            return {"vllm_config": {"parallel_config": {"worker_extension_cls": self.extension}}}
        if path == "/collective_rpc" and body["args"]:
            version, folder = body["args"]
            self._held = {"version": version, "digest": weights_digest(Path(folder))}
        return {"results": [self._held], "success": True}


@asynccontextmanager
async def running(control: FakeControl, tmp_path: Path) -> AsyncIterator[Server]:
    end = await asyncio.start_server(control.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{end.sockets[0].getsockname()[1]}"
    (server,) = servers(VllmSamplerConfig(url=(url,)), "float32", tmp_path)
    async with end:
        yield server
        await server.close()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"made-up weights")
    return tmp_path


def test_held_version_is_proved_and_not_loaded_again(weights: Path) -> None:
    async def run(control: FakeControl) -> None:
        async with running(control, weights) as server:
            await server.bring_to(0, weights, ())
            control.seen.clear()
            await server.bring_to(0, weights, ())
            assert control.seen == ["/v1/models", "/server_info", "posttrain_held"]

    asyncio.run(run(FakeControl()))


def test_interrupted_pause_is_ended(weights: Path) -> None:
    """A server that waits for requests of others before it pauses would stay paused for good."""

    async def run(control: FakeControl) -> None:
        async with running(control, weights) as server:
            control.hangs_at = "/pause"
            bringing = asyncio.create_task(server.bring_to(0, weights, ()))
            async with asyncio.timeout(10):
                while "/pause" not in control.seen:
                    await asyncio.sleep(0.001)
            bringing.cancel()
            await asyncio.wait([bringing])
            assert control.seen[-2:] == ["/pause", "/resume"]

    asyncio.run(run(FakeControl()))


def test_server_that_was_restarted_without_the_extension_is_not_asked_what_it_holds(weights: Path) -> None:
    """A call of a method that workers lack ends vLLM's engine."""

    async def run(control: FakeControl) -> None:
        async with running(control, weights) as server:
            await server.bring_to(0, weights, ())
            control.extension = ""
            control.seen.clear()
            with pytest.raises(SamplerUnavailable, match=r"without --worker-extension-cls"):
                await server.bring_to(0, weights, ())
            assert "posttrain_held" not in control.seen

    asyncio.run(run(FakeControl()))


def test_processes_that_do_not_end_are_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"], process_group=0) as popen:
        held = process.ServerProcess(popen, "", "", tmp_path / "log", 0, tmp_path / "inside", on_cpu=True)
        with monkeypatch.context() as patched:
            patched.setattr(process, "kill_group", lambda group: None)  # as a driver that does not let go of it
            patched.setattr(process, "GONE_SECONDS", 0.1)
            with pytest.raises(TimeoutError, match=rf"processes {popen.pid} of a vLLM server"):
                held.wait_until_gone()
        held.wait_until_gone()
        assert held.popen.poll() is not None
