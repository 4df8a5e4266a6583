"""One writer per run.

Locally an flock, which the kernel frees the moment its holder dies. Elsewhere a record that the holder rewrites by
`put_if_match` every few seconds; it may be taken over once it stayed unchanged for a TTL on the taker's own clock.
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO

from posttrain_core import layout
from posttrain_core.errors import RunConflict, StoreError
from posttrain_core.store.protocol import ObjectStore

TTL_SECONDS = 30.0


@dataclass
class Lease:
    """Use as a context manager; `check` before each commit."""

    store: ObjectStore
    run: str
    ttl_seconds: float = TTL_SECONDS
    _nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    _lock: IO[bytes] | None = None
    _etag: str | None = None
    _lost: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Lease":
        path = self.store.local_path(layout.lease(self.run))
        if path is None:
            self._take_by_record()
            return self
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read()
            lock.close()
            raise self._refusal(holder) from None
        lock.truncate(0)
        lock.write(self._record(0))
        lock.flush()
        self._lock = lock
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._release_record()
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def check(self) -> None:
        """RunConflict when this process no longer holds the run."""
        if self._lost:
            raise RunConflict(f"run {self.run!r} was taken over by another process: {self._lost}")
        if self._lock is None and self._etag is None:
            raise RunConflict(f"run {self.run!r} is not held by this process")

    def _record(self, beat: int) -> bytes:
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "nonce": self._nonce, "beat": beat}
        return json.dumps(holder | {"since": time.strftime("%Y-%m-%d %H:%M:%S%z")}).encode()

    def _take_by_record(self) -> None:
        key = layout.lease(self.run)
        found = self.store.stat(key)
        if found is not None and self.store.get(key) != b"{}":
            self._wait_unchanged(key, found.etag, self.store.get(key))
        self._etag = self.store.put_if_match(key, self._record(0), found.etag if found else None)
        if self._etag is None:
            raise self._refusal(self.store.get(key))
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def _wait_unchanged(self, key: str, etag: str, holder: bytes) -> None:
        deadline = time.monotonic() + self.ttl_seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self.ttl_seconds / 4))
            now = self.store.stat(key)
            if now is None or now.etag != etag:
                raise self._refusal(holder)

    def _beat(self) -> None:
        beat = 0
        last = time.monotonic()
        while not self._stop.wait(self.ttl_seconds / 5):
            beat += 1
            try:
                etag = self.store.put_if_match(layout.lease(self.run), self._record(beat), self._etag)
                if etag is None:
                    self._lost = self.store.get(layout.lease(self.run)).decode(errors="replace")
                    return
                self._etag, last = etag, time.monotonic()
            except StoreError as error:
                if time.monotonic() - last > self.ttl_seconds:
                    self._lost = f"its lease could not be renewed ({error})"
                    return

    def _release_record(self) -> None:
        if not self._lost and self._etag is not None:
            self.store.put_if_match(layout.lease(self.run), b"{}", self._etag)
        self._etag = None

    def _refusal(self, holder: bytes) -> RunConflict:
        try:
            who = json.loads(holder)
            text = f"process {who['pid']} on {who['host']} since {who['since']}"
        except (ValueError, KeyError):
            text = "another process"
        return RunConflict(
            f"run {self.run!r} in {self.store.url} is held by {text}; "
            "wait for it or stop it, or start another run (--set run=NAME)"
        )
