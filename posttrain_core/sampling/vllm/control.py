"""The calls by which a vLLM server is controlled: pause, swap, drop caches, score tokens, sleep."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

ANSWER_SECONDS = 60.0  # of a call that computes little


class ControlFault(Exception):
    """The server did not do what it was asked; the message says what it answered. `status` is the HTTP status."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Control:
    """Each call raises ControlFault where the server is gone, too slow or refuses."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=ANSWER_SECONDS)).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def context_length(self) -> int:
        return int((await self._call("GET", "/v1/models"))["data"][0]["max_model_len"])

    async def worker_extension(self) -> str:
        """Name of the class that the server was started with; empty when none. 404 without development mode."""
        info = await self._call("GET", "/server_info", params={"config_format": "json"})
        return str(info["vllm_config"]["parallel_config"]["worker_extension_cls"])

    async def pause(self) -> None:
        """New requests wait from here on; returns once those under way have ended."""
        await self._call("POST", "/pause", params={"mode": "wait"})

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def drop_caches(self) -> None:
        if not (await self._call("POST", "/reset_prefix_cache"))["success"]:
            raise ControlFault("/reset_prefix_cache: blocks of the cache are in use still")

    async def swap(self, version: int, folder: str, seconds: float) -> list[dict[str, str]]:
        return await self._workers("posttrain_swap", str(version), folder, seconds=seconds)

    async def held(self) -> list[dict[str, str]]:
        return await self._workers("posttrain_held")

    async def sleep(self) -> None:
        """Level 2: weights and caches are given up, not copied to the host; the next swap brings weights."""
        await self._call("POST", "/sleep", params={"level": 2, "mode": "wait"})

    async def wake(self, tags: str) -> None:
        await self._call("POST", "/wake_up", params={"tags": tags})

    async def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities (n - 1 floats) of the tokens after the first, each given those before it."""
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._call("POST", "/v1/completions", json=body)
        rows = answer["choices"][0]["prompt_logprobs"]
        return [row[str(token)]["logprob"] for row, token in zip(rows[1:], token_ids[1:], strict=True)]

    async def _workers(self, method: str, *arguments: str, seconds: float = ANSWER_SECONDS) -> list[dict[str, str]]:
        body = {"method": method, "args": arguments}
        answers: list[dict[str, str]] = (await self._call("POST", "/collective_rpc", seconds, json=body))["results"]
        return answers

    async def _call(self, method: str, path: str, seconds: float = ANSWER_SECONDS, **content: Any) -> Any:
        try:
            async with asyncio.timeout(seconds):
                response = await self._http.request(method, path, **content)
        except TimeoutError:
            raise ControlFault(f"{path}: no answer within {seconds:g} seconds") from None
        except httpx.TransportError as error:
            raise ControlFault(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code != httpx.codes.OK:
            raise ControlFault(f"{path}: HTTP {response.status_code} {response.text[:500]}", response.status_code)
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise ControlFault(f"{path}: not JSON but {response.text[:500]}") from error
