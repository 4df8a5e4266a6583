"""The tables of a run as Arrow datasets: the objects that manifests name, read lazily and column by column."""

import io
import threading
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from posttrain_core.inspect.catalogue import Run
from posttrain_core.manifest import ObjectRef, read_object
from posttrain_core.records import Purpose
from posttrain_core.schema import arrow_schema
from posttrain_core.store import ObjectStore

STAGE_OF_TABLE = {
    "plan": "plan",
    "rollouts": "generate",
    "executions": "execute",
    "verdicts": "verify",
    "samples": "update",
}
_SMALL_BYTES = 1 << 20  # up to here a request more costs more than the bytes
_FORMAT = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)


def dataset(run: Run, name: str) -> ds.Dataset:
    """The committed rows of a table of `schema.TABLES`, with `iteration` (of an evaluation: the policy version) and
    `purpose` in front. Nothing is read before the dataset is."""
    fragments = []
    for purpose in Purpose:
        for scope, manifest in run.manifests(*_where(run, name, purpose)).items():
            place = (ds.field("iteration") == scope.iteration) & (ds.field("purpose") == str(purpose))
            fragments += [_fragment(run.store, ref, place) for ref in manifest.objects if ref.num_rows >= 0]
    columns = [field for field in arrow_schema(name) if field.name != "purpose"]
    schema = pa.schema([pa.field("iteration", pa.int64()), pa.field("purpose", pa.string()), *columns])
    return ds.FileSystemDataset(fragments, schema, _FORMAT)


def read(run: Run, name: str, columns: list[str] | None = None, where: ds.Expression | None = None) -> pa.Table:
    """Rows of a table; only `columns` are read. ObjectCorrupt names the object that is damaged."""
    try:
        return dataset(run, name).to_table(columns=columns, filter=where)
    except (pa.ArrowException, OSError):
        check_objects(run, name)
        raise


def check_objects(run: Run, name: str) -> None:
    """Read every object of a table whole: ObjectCorrupt or ObjectNotFound names the first that is not as committed."""
    for purpose in Purpose:
        for manifest in run.manifests(*_where(run, name, purpose)).values():
            for ref in manifest.objects:
                if ref.num_rows >= 0:
                    read_object(run.store, ref)


def _where(run: Run, name: str, purpose: Purpose) -> tuple[Any, str]:
    stage = STAGE_OF_TABLE[name]
    return run.scopes(purpose, stage), stage


def _fragment(store: ObjectStore, ref: ObjectRef, place: ds.Expression) -> ds.Fragment:
    return _FORMAT.make_fragment(pa.PythonFile(_ObjectFile(store, ref), "r"), partition_expression=place)


class _ObjectFile(io.RawIOBase):
    """An object as a file that fetches what is read of it: ranges of a large one, a small one whole and checked."""

    def __init__(self, store: ObjectStore, ref: ObjectRef) -> None:
        self._store, self._ref = store, ref
        self._position = 0
        self._whole: bytes | None = None
        self._lock = threading.Lock()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ref.num_bytes}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._ref.num_bytes - self._position)
        size = left if size < 0 else min(size, left)
        data = self._fetch(self._position, size) if size else b""
        self._position += len(data)
        return data

    def _fetch(self, start: int, size: int) -> bytes:
        if self._ref.num_bytes > _SMALL_BYTES:
            return self._store.get_range(self._ref.key, start, size)
        with self._lock:
            if self._whole is None:
                self._whole = read_object(self._store, self._ref)
        return self._whole[start : start + size]
