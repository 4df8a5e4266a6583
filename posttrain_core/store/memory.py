"""A store in memory, for tests."""

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from posttrain_core.errors import ObjectNotFound, StoreError
from posttrain_core.store.protocol import ObjectInfo, check_key, check_prefix


class MemoryStore:
    def __init__(self) -> None:
        self.url = "memory"
        self._objects: dict[str, bytes] = {}
        self._modified: dict[str, float] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise ObjectNotFound(f"no object {key!r} in store {self.url}") from None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self.get(key)
        start = max(0, len(data) + start) if start < 0 else start
        return data[start : start + max(0, length)]

    def put(self, key: str, data: bytes) -> None:
        self._modified[check_key(key)] = time.time()
        self._objects[key] = data

    put_volatile = put

    def put_file(self, key: str, path: Path) -> None:
        try:
            self.put(key, path.read_bytes())
        except OSError as error:
            raise StoreError(f"cannot write {key!r} in store {self.url}: {error}") from error

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self.put_if_match(key, data, None) is not None

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        with self._lock:
            found = self.stat(key)
            if (found.etag if found else None) != etag:
                return None
            self.put(key, data)
        return hashlib.sha256(data).hexdigest()

    def get_file(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key))

    def local_path(self, key: str) -> Path | None:
        return None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        for key in sorted(self._objects):
            if key > after and key.startswith(prefix) and (info := self.stat(key)) is not None:
                yield info

    def stat(self, key: str) -> ObjectInfo | None:
        data = self._objects.get(check_key(key))
        if data is None:
            return None
        return ObjectInfo(key, len(data), hashlib.sha256(data).hexdigest(), self._modified[key])

    def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)
