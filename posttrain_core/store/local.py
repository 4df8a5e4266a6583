"""A local folder as an object store: temp file, fsync, hard link, fsync of the folder."""

import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain_core.errors import ObjectNotFound, StoreError, StoreFull
from posttrain_core.store.protocol import ObjectInfo, check_key

_PRIVATE = ".store"  # temp files and locks, beside the objects so that links stay inside one file system


class LocalStore:
    """One folder. Works for any number of processes on one machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self._private = root / _PRIVATE

    def get(self, key: str) -> bytes:
        with self._errors("read", key):
            return self._path(key).read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._errors("read", key), self._path(key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size + start) if start < 0 else start)
            return file.read(length)

    def put(self, key: str, data: bytes) -> None:
        with self._errors("write", key), self._temporary(data, durable=True) as temporary:
            path = self._parent_made(key)
            os.replace(temporary, path)
            _fsync_folder(path.parent)

    def put_volatile(self, key: str, data: bytes) -> None:
        with self._errors("write", key), self._temporary(data, durable=False) as temporary:
            os.replace(temporary, self._parent_made(key))

    def put_file(self, key: str, path: Path) -> None:
        with self._errors("write", key), self._temporary(b"", durable=False) as temporary:
            shutil.copyfile(path, temporary)
            _fsync_file(temporary)
            target = self._parent_made(key)
            os.replace(temporary, target)
            _fsync_folder(target.parent)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._errors("write", key):
            path = self._parent_made(key)
            if path.exists():
                return False
            with self._temporary(data, durable=True) as temporary:
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return False
            _fsync_folder(path.parent)
            return True

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        with self._errors("write", key), self._locked(key):
            found = self.stat(key)
            if (found.etag if found else None) != etag:
                return None
            self.put(key, data)
            return _etag(data)

    def get_file(self, key: str, path: Path) -> None:
        with self._errors("read", key):
            shutil.copyfile(self._path(key), path)

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = self.root / prefix.rpartition("/")[0]
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            key = path.relative_to(self.root).as_posix()
            if key.startswith(prefix) and not key.startswith(_PRIVATE) and path.is_file():
                yield ObjectInfo(key, path.stat().st_size, "")

    def stat(self, key: str) -> ObjectInfo | None:
        with self._errors("read", key):
            path = self._path(key)
            if not path.is_file():
                return None
            data = path.read_bytes()
            return ObjectInfo(key, len(data), _etag(data))

    def delete(self, key: str) -> None:
        with self._errors("delete", key), suppress(FileNotFoundError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _parent_made(self, key: str) -> Path:
        path = self._path(key)
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            _fsync_folder(path.parent.parent)
        return path

    @contextmanager
    def _temporary(self, data: bytes, durable: bool) -> Iterator[Path]:
        self._private.mkdir(parents=True, exist_ok=True)
        temporary = self._private / f"{uuid.uuid4().hex}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        self._private.mkdir(parents=True, exist_ok=True)
        with (self._private / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectNotFound(f"no object {key!r} in store {self.url}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(
                    f"no space left to {operation} {key!r} in store {self.url}; "
                    "nothing was half written: free some space, then resume the run"
                ) from error
            raise StoreError(f"cannot {operation} {key!r} in store {self.url}: {error}") from error


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_fsync_folder = _fsync_file
