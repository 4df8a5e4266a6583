"""The store protocol: an object exists whole or it does not exist."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain_core.errors import StoreError


@dataclass(frozen=True)
class ObjectInfo:
    """`etag` changes whenever the object's bytes do; it is opaque. `modified` is by the store's clock, not ours."""

    key: str
    num_bytes: int
    etag: str
    modified: float  # seconds since the epoch; some servers round it to seconds


class ObjectStore(Protocol):
    """Keys are relative, '/'-separated and never contain '..'.

    Conditional writes decide races: exactly one writer of `put_if_absent` gets True. (Where an answer was lost, two
    writers of the very same bytes may both get it.) Every method raises StoreError (ObjectNotFound, StoreFull) with the
    key and the cause, after transient faults were retried.
    """

    url: str

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`; fewer at the end of the object, none past it. A negative start counts back."""

    def put(self, key: str, data: bytes) -> None:
        """Unconditional: only for keys that carry an attempt id or a nonce. Durable on return."""

    def put_volatile(self, key: str, data: bytes) -> None:
        """As `put`, but it may be lost with the machine: telemetry."""

    def put_file(self, key: str, path: Path) -> None:
        """As `put`, from a file that is not written to any more."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """False, and nothing written, when the key exists."""

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        """Replace the object whose etag is given (None: it must not exist). The new etag, or None when it lost."""

    def get_file(self, key: str, path: Path) -> None:
        """Write the object's bytes to `path`."""

    def local_path(self, key: str) -> Path | None:
        """A path at which the object, or the objects under a prefix, can be read in place; None when there is none."""

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix` ("" is all) and is greater than `after`, by key; lazily. The etag may
        be empty here."""

    def stat(self, key: str) -> ObjectInfo | None: ...

    def delete(self, key: str) -> None:
        """No error when it is not there."""


def check_key(key: str) -> str:
    """The key itself; StoreError for one that could leave the store or name two objects, or is no Unicode text."""
    parts = key.split("/")
    surrogates = any("\ud800" <= character <= "\udfff" for character in key)
    if not key or "\0" in key or surrogates or any(part in ("", ".", "..") for part in parts):
        raise StoreError(f"not a store key: {key!r} (relative, no empty part, no '.' or '..', Unicode)")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself; StoreError for one that no key can begin with, but for "" which all keys do."""
    if prefix:
        check_key(prefix.removesuffix("/") if not prefix.endswith("//") else prefix)
    return prefix
