"""A store that counts what is read through it."""

import threading
from collections.abc import Iterator
from pathlib import Path

from posttrain_core.store.protocol import ObjectInfo, ObjectStore


class CountedStore:
    """Another store, with the bytes of objects read so far and the requests made for them (reads and looks; a listing
    is one for each 1000 keys, as S3 has it). Safe for several threads."""

    def __init__(self, store: ObjectStore) -> None:
        self.url = store.url
        self.num_bytes = 0
        self.num_requests = 0
        self._store = store
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        self._ask()
        return self._took(self._store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._ask()
        return self._took(self._store.get_range(key, start, length))

    def get_file(self, key: str, path: Path) -> None:
        self._ask()
        self._store.get_file(key, path)
        self._add(path.stat().st_size)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._ask()
        for place, info in enumerate(self._store.list(prefix, after), start=1):
            if place % 1000 == 0:
                self._ask()
            yield info

    def stat(self, key: str) -> ObjectInfo | None:
        self._ask()
        return self._store.stat(key)

    def local_path(self, key: str) -> Path | None:
        return self._store.local_path(key)

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)

    def put_volatile(self, key: str, data: bytes) -> None:
        self._store.put_volatile(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self._store.put_file(key, path)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._store.put_if_absent(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        return self._store.put_if_match(key, data, etag)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def _ask(self) -> None:
        with self._lock:
            self.num_requests += 1

    def _took(self, data: bytes) -> bytes:
        self._add(len(data))
        return data

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
