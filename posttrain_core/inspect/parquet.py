"""Parquet objects read through the store: of a large one its footer and the parts that are asked for, no more.

Bytes are fetched and decoded in the calling thread, from memory that is Arrow's own. Arrow's threads are never handed
a Python object: one that let go of it while the interpreter ends would bring the process down.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain_core.manifest import ObjectRef, read_object
from posttrain_core.schema import corrupt
from posttrain_core.store import ObjectStore

T = TypeVar("T")

_WHOLE_BYTES = 128 << 10  # up to here one request for all of it costs less than two for parts
_TAIL_BYTES = 16 << 10  # holds the footer of a table with one row group
_GAP_BYTES = 64 << 10  # what lies between two parts is fetched with them up to here
_PART_BYTES = 8 << 20  # no request is for more than this, so that several are under way
_NUM_FOOTERS = 1024

Span = tuple[int, int]  # start and end
Fetch = Callable[[Callable[[Span], None], list[Span]], Iterable[None]]  # as map: may do several at once


class Footers:
    """The footers that were read lately, by the object's digest. Safe for several threads."""

    def __init__(self) -> None:
        self._found: dict[str, pq.FileMetaData] = {}
        self._lock = threading.Lock()

    def get(self, digest: str) -> pq.FileMetaData | None:
        return self._found.get(digest)

    def put(self, digest: str, footer: pq.FileMetaData) -> None:
        with self._lock:
            self._found[digest] = footer
            if len(self._found) > _NUM_FOOTERS:
                del self._found[next(iter(self._found))]


class ParquetObject:
    """One committed table object.

    A small one is fetched whole and compared with its digest; of a large one each page is compared with its checksum.
    It is a buffer of the object's size in which only what was fetched is filled in; the rest is never looked at.
    """

    def __init__(self, store: ObjectStore, ref: ObjectRef, footers: Footers) -> None:
        self.ref = ref
        self._store, self._footers = store, footers
        self._buffer: pa.Buffer | None = None

    @property
    def footer(self) -> pq.FileMetaData:
        found = self._footers.get(self.ref.digest)
        if found is None:
            found = self._checked(self._read_footer)
            self._footers.put(self.ref.digest, found)
        return found

    def read(self, columns: Sequence[str], groups: Sequence[int], fetch: Fetch = map) -> pa.Table:
        """Columns of row groups. ObjectCorrupt or ObjectNotFound when the object is not as committed."""
        footer = self.footer
        buffer = self._filled()
        if not self._is_small:
            for _ in fetch(self._fill, _parts(footer, columns, groups)):
                pass
        return self._checked(lambda: _decode(buffer, footer, columns, groups))

    @property
    def _is_small(self) -> bool:
        return self.ref.num_bytes <= _WHOLE_BYTES

    def _read_footer(self) -> pq.FileMetaData:
        buffer, size = self._filled(), self.ref.num_bytes
        if not self._is_small:
            self._fill((size - _TAIL_BYTES, size))
            length = int.from_bytes(buffer[size - 8 : size - 4].to_pybytes(), "little") + 8
            if _TAIL_BYTES < length <= size:
                self._fill((size - length, size - _TAIL_BYTES))
        return pq.read_metadata(pa.BufferReader(buffer))

    def _filled(self) -> pa.Buffer:
        """The buffer; a small object's is complete."""
        if self._buffer is None:
            self._buffer = pa.allocate_buffer(self.ref.num_bytes)
            if self._is_small:
                self._put(0, read_object(self._store, self.ref))
        return self._buffer

    def _fill(self, part: Span) -> None:
        start, end = part
        self._put(start, self._store.get_range(self.ref.key, start, end - start), end - start)

    def _put(self, start: int, data: bytes, expected: int | None = None) -> None:
        assert self._buffer is not None
        if expected is not None and len(data) != expected:
            raise corrupt(self.ref.key, f"it ends before the {self.ref.num_bytes} bytes that its manifest names")
        memoryview(self._buffer).cast("B")[start : start + len(data)] = data

    def _checked(self, read: Callable[[], T]) -> T:
        """Whole and against its digest, once it could not be read."""
        try:
            return read()
        except (pa.ArrowException, OSError):
            read_object(self._store, self.ref)
            raise


def _decode(buffer: pa.Buffer, footer: pq.FileMetaData, columns: Sequence[str], groups: Sequence[int]) -> pa.Table:
    reader = pa.BufferReader(buffer)
    file = pq.ParquetFile(reader, metadata=footer, pre_buffer=False, page_checksum_verification=True)
    return file.read_row_groups(list(groups), list(columns), use_threads=False)


def _parts(footer: pq.FileMetaData, columns: Sequence[str], groups: Sequence[int]) -> list[Span]:
    """Where the columns' chunks lie; neighbours together, and none longer than a request should be."""
    wanted = set(columns)
    chunks: list[Span] = []
    for group in map(footer.row_group, groups):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.partition(".")[0] in wanted:
                offsets = (column.dictionary_page_offset, column.data_page_offset)
                start = min(offset for offset in offsets if offset)
                chunks.append((start, start + column.total_compressed_size))
    joined: list[Span] = []
    for start, end in sorted(chunks):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return [(at, min(at + _PART_BYTES, end)) for start, end in joined for at in range(start, end, _PART_BYTES)]
