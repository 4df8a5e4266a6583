"""Weights put where servers on other machines find them."""

import asyncio
import shutil
import uuid
from pathlib import Path

from posttrain_core.sampling.vllm.worker_extension import weight_files

_PREFIX = "policy-"
_PARTIAL = ".partial-"


class SharedFolder:
    """Holds the weights of one version at a time. Of one run, used from one asyncio loop by all its servers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()

    async def put(self, version: int, folder: Path, digest: str) -> Path:
        """Where the weights of `folder`, with this digest, are for all. Other versions are removed. Raises OSError."""
        place = self._folder / f"{_PREFIX}{version}-{digest[:16]}"
        async with self._lock:
            if not place.exists():
                await asyncio.to_thread(self._copy, folder, place)
        return place

    def _copy(self, folder: Path, place: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.iterdir():
            if old.name.startswith((_PREFIX, _PARTIAL)):
                shutil.rmtree(old, ignore_errors=True)
        partial = self._folder / f"{_PARTIAL}{uuid.uuid4().hex}"
        partial.mkdir()
        for path in weight_files(folder):
            shutil.copy(path, partial / path.name)
        for path in folder.glob("*.safetensors.index.json"):
            shutil.copy(path, partial / path.name)
        partial.rename(place)
