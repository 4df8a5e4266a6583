"""One vLLM server: started when it is ours, swapped to a policy version in place, proved, watched."""

from collections.abc import Sequence
from pathlib import Path

import httpx

from posttrain_core.sampling.protocol import Probe


class Server:
    """Used from one asyncio loop. `held` is what the server was proved to hold; None: nothing may be sampled from it."""

    name: str  # for messages: the URL, or "vLLM server 0"
    http: httpx.AsyncClient  # base_url and API key set, no total timeout; of the running process
    held: tuple[int, Path] | None
    context_length: int  # once something is held

    async def bring_to(self, version: int, folder: Path, probes: Sequence[Probe]) -> None:
        """Start the server when it is ours and does not run, swap the weights, drop all cached state, prove it.

        Requests in flight must have ended. Raises SamplerUnavailable, with `held` None.
        """
        raise NotImplementedError

    def lost(self, reason: str) -> None:
        """It died, hung or answered nonsense: `held` becomes None. A process of ours is killed, and the next
        `bring_to` starts another."""
        raise NotImplementedError

    async def release(self) -> None:
        """Let the server sleep where `launch.sleep_while_training` asks for it; `held` becomes None then."""
        raise NotImplementedError

    async def close(self) -> None:
        """A process of ours is gone afterwards."""
        raise NotImplementedError
