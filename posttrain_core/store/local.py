"""A local folder as an object store: temp file, fsync, hard link or rename, fsync of the folder.

A temp file that a killed writer left is never part of a listing; the next process that finds itself the only writer
of the store removes it.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain_core.errors import ObjectNotFound, StoreError, StoreFull
from posttrain_core.store.protocol import ObjectInfo, check_key, check_prefix

_PRIVATE = ".store"  # temp files and locks, beside the objects so that links stay inside one file system
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class LocalStore:
    """One folder. Works for any number of processes on one machine. No key may be another one's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self._private = root / _PRIVATE
        self._durable: set[Path] = set()  # folders whose entry in their parent is known to be on disk
        self._opening = threading.Lock()
        self._writing = False

    def get(self, key: str) -> bytes:
        with self._errors("read", key):
            return self._path(key).read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._errors("read", key), self._path(key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size + start) if start < 0 else start)
            return file.read(max(0, length))

    def put(self, key: str, data: bytes) -> None:
        with self._errors("write", key), self._temporary() as temporary:
            _write(temporary, data, durable=True)
            self._replace(temporary, key)

    def put_volatile(self, key: str, data: bytes) -> None:
        with self._errors("write", key), self._temporary() as temporary:
            _write(temporary, data, durable=False)
            self._make_folder(self._path(key).parent)
            os.replace(temporary, self._path(key))

    def put_file(self, key: str, path: Path) -> None:
        with self._errors("write", key), self._temporary() as temporary:
            shutil.copyfile(path, temporary)
            _fsync(temporary)
            self._replace(temporary, key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._errors("write", key):
            path = self._path(key)
            self._make_folder(path.parent)
            won = not path.exists() and self._link(path, data)
            _fsync(path.parent)  # the loser builds on the winner's object, so it must be durable for both
            return won

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        if etag is None:
            return _etag(data) if self.put_if_absent(key, data) else None
        with self._errors("write", key), self._locked(key):
            found = self.stat(key)
            if found is None or found.etag != etag:
                return None
            self.put(key, data)
            return _etag(data)

    def get_file(self, key: str, path: Path) -> None:
        with self._errors("read", key):
            shutil.copyfile(self._path(key), path)

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        folder, _, start = check_prefix(prefix).rpartition("/")
        with self._errors("list", prefix):
            yield from self._walk(self.root / folder, f"{folder}/" if folder else "", start, after)

    def stat(self, key: str) -> ObjectInfo | None:
        try:
            data = self.get(key)
            modified = self._path(key).stat().st_mtime
        except (ObjectNotFound, *_NO_OBJECT):
            return None
        return ObjectInfo(key, len(data), _etag(data), modified)

    def delete(self, key: str) -> None:
        with self._errors("delete", key), suppress(*_NO_OBJECT):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        if check_key(key).split("/")[0] == _PRIVATE:
            raise StoreError(f"not a store key: {key!r} (a local store keeps {_PRIVATE!r} to itself)")
        return self.root / key

    def _walk(self, folder: Path, prefix: str, start: str, after: str) -> Iterator[ObjectInfo]:
        """By key: a folder sorts as its name with the '/' that its keys have there."""
        if prefix.startswith(f"{_PRIVATE}/"):
            return
        try:
            with os.scandir(folder) as entries:
                found = {entry.name + "/" * entry.is_dir(): entry for entry in entries if entry.name.startswith(start)}
        except _NO_OBJECT:
            return
        for name in sorted(found):
            is_folder = name.endswith("/")
            if prefix + name <= after and not (is_folder and after.startswith(prefix + name)):
                continue
            if is_folder:
                yield from self._walk(folder / name, prefix + name, "", after)
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile
                status = found[name].stat()
                yield ObjectInfo(prefix + name, status.st_size, "", status.st_mtime)

    def _make_folder(self, folder: Path) -> None:
        """Every level of it on disk, even where another process made it and may not have come to its fsync."""
        if folder in self._durable:
            return
        outside = folder != self.root and self.root not in folder.parents
        if outside and folder.is_dir():
            return
        self._make_folder(folder.parent)
        made = not folder.is_dir()
        folder.mkdir(exist_ok=True)
        if made or folder != self.root:
            _fsync(folder.parent)
        self._durable.add(folder)

    def _replace(self, temporary: Path, key: str) -> None:
        path = self._path(key)
        self._make_folder(path.parent)
        os.replace(temporary, path)
        _fsync(path.parent)

    def _link(self, path: Path, data: bytes) -> bool:
        with self._temporary() as temporary:
            _write(temporary, data, durable=True)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        return True

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        self._become_writer()
        temporary = self._private / f"{uuid.uuid4().hex}.tmp"
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _become_writer(self) -> None:
        """Share the writers' lock for as long as this object lives; who gets it alone first tidies up."""
        with self._opening:
            if self._writing:
                return
            self._make_folder(self._private)
            lock = os.open(self._private / "writers", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            weakref.finalize(self, os.close, lock)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in self._private.glob("*.tmp"):
                    left.unlink(missing_ok=True)
            fcntl.flock(lock, fcntl.LOCK_SH)
            self._writing = True

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        self._make_folder(self._private)
        with (self._private / f"{hashlib.sha256(check_key(key).encode()).hexdigest()[:32]}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if operation == "read" and isinstance(error, _NO_OBJECT):
                raise ObjectNotFound(f"no object {key!r} in store {self.url}") from error
            if error.errno in _FULL:
                raise StoreFull(
                    f"no space left to {operation} {key!r} in store {self.url}; "
                    "nothing was half written: free some space, then resume the run"
                ) from error
            raise StoreError(f"cannot {operation} {key!r} in store {self.url}: {error}") from error


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes, durable: bool) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _fsync(path: Path) -> None:
    """Of a file's contents or of a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
