"""One writer per run.

Locally an flock, which the kernel frees the moment its holder dies. Elsewhere a record that the holder rewrites by
`put_if_match` every few seconds; it may be taken over once it stayed unchanged for a TTL on the taker's own clock. The
holder stops believing in it a TTL after it last began a rewrite that succeeded, which is never later.
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from posttrain_core import layout
from posttrain_core.errors import ObjectNotFound, RunConflict, StoreError
from posttrain_core.store.protocol import ObjectInfo, ObjectStore

TTL_SECONDS = 30.0
_FREE = b"{}"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine is suspended


@dataclass
class Lease:
    """Use as a context manager; `check` before each commit."""

    store: ObjectStore
    run: str
    ttl_seconds: float = TTL_SECONDS
    _nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    _since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S%z"))
    _lock: IO[bytes] | None = None
    _path: Path | None = None
    _etag: str | None = None
    _renewed: float = 0.0
    _lost: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Lease":
        self._path = self.store.local_path(layout.lease(self.run))
        if self._path is None:
            self._take_by_record()
        else:
            try:
                self._take_by_lock(self._path)
            except OSError as error:
                raise StoreError(f"cannot take the lease {self._path}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.ttl_seconds)
            self._release_record()
        if self._lock is not None:
            with suppress(OSError):
                self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def check(self) -> None:
        """RunConflict when this process no longer holds the run."""
        if self._lock is not None and self._path is not None:
            self._check_lock(self._lock, self._path)
        elif self._lost:
            raise RunConflict(f"run {self.run!r} was taken over by another process: {self._lost}")
        elif self._etag is None:
            raise RunConflict(f"run {self.run!r} is not held by this process")
        elif _now() - self._renewed >= self.ttl_seconds:
            raise RunConflict(
                f"run {self.run!r}: its lease in {self.store.url} could not be renewed for {self.ttl_seconds:g} s, so "
                "another process may hold it; resume the run"
            )

    # --- on this machine ---

    def _take_by_lock(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+b", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            with suppress(OSError):  # who holds it is a help to others; on a full disk the lock holds without
                lock.write(self._record(0))
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read()
            lock.close()
            raise self._refusal(holder) from None
        except OSError:
            lock.close()
            raise
        self._lock = lock

    def _check_lock(self, lock: IO[bytes], path: Path) -> None:
        """A lock on a file that was deleted or replaced keeps nobody out."""
        try:
            same = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except OSError:
            same = False
        if not same:
            raise RunConflict(f"run {self.run!r}: its lease {path} was deleted or replaced; resume the run")

    # --- by record ---

    def _take_by_record(self) -> None:
        key = layout.lease(self.run)
        found, holder = self._look()
        if found is not None and holder != _FREE:
            self._wait_unchanged(found.etag, holder)
        begun = _now()
        self._etag = self.store.put_if_match(key, self._record(0), found.etag if found else None)
        if self._etag is None:
            raise self._refusal(self._look()[1])
        self._renewed = begun
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def _look(self) -> tuple[ObjectInfo | None, bytes]:
        key = layout.lease(self.run)
        found = self.store.stat(key)
        try:
            return found, self.store.get(key) if found else _FREE
        except ObjectNotFound:
            return None, _FREE

    def _wait_unchanged(self, etag: str, holder: bytes) -> None:
        deadline = _now() + self.ttl_seconds
        while _now() < deadline:
            time.sleep(min(1.0, self.ttl_seconds / 4))
            now = self.store.stat(layout.lease(self.run))
            if now is None or now.etag != etag:
                raise self._refusal(holder)

    def _beat(self) -> None:
        beat = 0
        while not self._stop.wait(self.ttl_seconds / 5):
            beat += 1
            begun = _now()
            try:
                etag = self.store.put_if_match(layout.lease(self.run), self._record(beat), self._etag)
                if etag is None and not self._still_mine():
                    return
            except StoreError:
                continue  # `check` counts the time since the last success
            if etag is not None:
                self._etag, self._renewed = etag, begun

    def _still_mine(self) -> bool:
        """After a rewrite that lost: to another process, or to an earlier one of our own whose answer never came."""
        found, holder = self._look()
        if found is not None and self._nonce.encode() in holder:
            self._etag = found.etag
            return True
        self._lost = holder.decode(errors="replace")
        return False

    def _release_record(self) -> None:
        if not self._lost and self._etag is not None:
            with suppress(StoreError):  # it runs out by itself
                freed = self.store.put_if_match(layout.lease(self.run), _FREE, self._etag)
                if freed is None and self._still_mine():
                    self.store.put_if_match(layout.lease(self.run), _FREE, self._etag)
        self._etag = None

    def _record(self, beat: int) -> bytes:
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": self._since, "nonce": self._nonce}
        return json.dumps(holder | {"beat": beat}).encode()

    def _refusal(self, holder: bytes) -> RunConflict:
        try:
            who = json.loads(holder)
            text = f"process {who['pid']} on {who['host']} since {who['since']}"
        except (ValueError, KeyError, TypeError):
            text = "another process"
        return RunConflict(
            f"run {self.run!r} in {self.store.url} is held by {text}; "
            "wait for it or stop it, or start another run (--set run=NAME)"
        )


def _now() -> float:
    return time.clock_gettime(_CLOCK)
