"""Objects as folders on this machine, for those who load weights from files: in place, or fetched into scratch."""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from posttrain_core.manifest import ObjectRef, fetch_folder
from posttrain_core.store.protocol import ObjectStore


class LocalFolders:
    """One folder per slot, fetched and checked once for all threads, until the slot is asked for another one.

    `cache` holds what was fetched; it never holds more than one folder per slot.
    """

    def __init__(self, store: ObjectStore, cache: Path) -> None:
        self._store, self._cache = store, cache
        self._held: dict[str, tuple[str, Path]] = {}  # slot -> (prefix, folder)
        self._lock = threading.Lock()

    def get(self, slot: str, refs: Sequence[ObjectRef], prefix: str) -> Path:
        """The folder of the objects under `prefix`. Raises ObjectNotFound or ObjectCorrupt; then the slot is empty."""
        with self._lock:
            held, folder = self._held.get(slot, ("", self._cache))
            if held != prefix:
                self._held.pop(slot, None)
                shutil.rmtree(self._cache / slot, ignore_errors=True)
                folder = fetch_folder(self._store, refs, prefix, self._cache / slot)
                self._held[slot] = (prefix, folder)
            return folder
