"""Arrow schemas of the tables, and the way between records and Parquet bytes.

A table's name is a key of `TABLES`. Each object's footer carries the schema version, the fingerprint's fields and a
seal, the sha256 of all other bytes, so an object found without its manifest can be judged by itself.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain_core.errors import ObjectCorrupt
from posttrain_core.records import Execution, Message, PlanRow, Problem, Rollout, Sample, Split, Verdict

R = TypeVar("R")

SCHEMA_VERSION = 2

_SEAL = b"posttrain.sha256:"  # followed by the digits
_UNSEALED = b"0" * 64


@dataclass(frozen=True)
class DemonstrationRow:
    """One supervised example of the warm start."""

    domain: str
    prompt: tuple[Message, ...]
    response: str


TABLES: dict[str, type] = {
    "plan": PlanRow,
    "rollouts": Rollout,
    "executions": Execution,
    "verdicts": Verdict,
    "samples": Sample,
    "demonstrations": DemonstrationRow,
}


def _list(item: pa.DataType) -> pa.DataType:
    """Named as Parquet names it, so that what is read back has the schema of what was written."""
    return pa.list_(pa.field("element", item))


_NARROW = {  # token columns are most of the bytes
    ("prompt_ids",): _list(pa.int32()),
    ("response_ids",): _list(pa.int32()),
    ("input_ids",): _list(pa.int32()),
    ("loss_mask",): _list(pa.int8()),
    ("sampler_logprobs",): _list(pa.float64()),
    ("reference_logprobs",): _list(pa.float64()),
}


def arrow_type(hint: Any) -> pa.DataType:
    """The Arrow type of a record field's annotation."""
    origin = get_origin(hint)
    if origin is tuple:
        return _list(arrow_type(get_args(hint)[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return pa.map_(*(arrow_type(argument) for argument in get_args(hint)))
    if is_dataclass(hint):
        return pa.struct(_arrow_fields(hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return pa.string()
    return {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}[hint]


def _arrow_fields(record: Any) -> list[pa.Field]:
    hints = get_type_hints(record)
    return [
        pa.field(f.name, _NARROW.get((f.name,)) or arrow_type(hints[f.name]), nullable=False) for f in fields(record)
    ]


@cache
def arrow_schema(name: str) -> pa.Schema:
    return pa.schema(_arrow_fields(TABLES[name]))


def to_table(name: str, records: Sequence[Any]) -> pa.Table:
    """Records of the table's class, in order, as an Arrow table."""
    schema, hints = arrow_schema(name), get_type_hints(TABLES[name])
    columns = []
    for field in schema:
        convert = _writer(hints[field.name])
        values = [getattr(record, field.name) for record in records]
        columns.append(pa.array(map(convert, values) if convert else values, type=field.type, size=len(values)))
    return pa.Table.from_arrays(columns, schema=schema)


def from_table(record: type[R], table: pa.Table) -> list[R]:
    """The inverse of `to_table`."""
    hints = get_type_hints(record)
    columns = []
    for field in fields(record):  # type: ignore[arg-type]
        convert = _reader(hints[field.name])
        values = table.column(field.name).to_pylist()
        columns.append(map(convert, values) if convert else values)
    return [record(*row) for row in zip(*columns, strict=True)]


Converter = Callable[[Any], Any]


@cache
def _writer(hint: Any) -> Converter | None:
    """From a value of the annotated type to what Arrow takes; None where Arrow takes the value itself."""
    origin = get_origin(hint)
    if origin is tuple:
        item = _writer(get_args(hint)[0])
        return (lambda values: [item(value) for value in values]) if item else None
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return lambda value: sorted(value.items())
    if is_dataclass(hint):
        parts = [(name, _writer(part) or _same) for name, part in get_type_hints(hint).items()]
        return lambda value: {name: convert(getattr(value, name)) for name, convert in parts}
    return None


@cache
def _reader(hint: Any) -> Converter | None:
    """The inverse of `_writer`."""
    origin = get_origin(hint)
    if origin is tuple:
        item = _reader(get_args(hint)[0])
        return (lambda values: tuple(map(item, values))) if item else tuple
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict
    if is_dataclass(hint):
        parts = [(name, _reader(part) or _same) for name, part in get_type_hints(hint).items()]
        return lambda value: hint(**{name: convert(value[name]) for name, convert in parts})  # type: ignore[operator]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {str(member): member for member in hint}.__getitem__
    return None


def _same(value: Any) -> Any:
    return value


def problem_json(problem: Problem) -> str:
    """What `PlanRow.problem` holds."""
    return json.dumps(asdict(problem), sort_keys=True)


@lru_cache(maxsize=4096)  # the rollouts of a group share their problem
def parse_problem(text: str) -> Problem:
    """The inverse of `problem_json`."""
    record: dict[str, Any] = json.loads(text)
    prompt = tuple(Message(**message | {"images": tuple(message["images"])}) for message in record.pop("prompt"))
    return Problem(prompt=prompt, split=Split(record.pop("split")), **record)


def to_parquet(table: pa.Table, fingerprint: Mapping[str, Any]) -> bytes:
    """Deterministic bytes: zstd, page checksums, the fingerprint's fields and the seal in the footer."""
    metadata = {
        "posttrain.schema": str(SCHEMA_VERSION),
        "posttrain.fingerprint": json.dumps(fingerprint, sort_keys=True, default=dict),
        "posttrain.seal": (_SEAL + _UNSEALED).decode(),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd", write_page_checksum=True)
    data = bytes(sink.getvalue())
    before, after = _around_seal(data)
    return before + _seal(before, after) + after


def from_parquet(data: bytes, key: str) -> tuple[pa.Table, dict[str, Any]]:
    """The table and its fingerprint's fields; ObjectCorrupt, naming `key`, when the bytes are not what was written."""
    before, after = _around_seal(data)
    if data[len(before) : len(data) - len(after)] != _seal(before, after):
        raise corrupt(key, f"its {len(data)} bytes do not match the digest in its footer")
    try:
        table = pq.read_table(pa.BufferReader(data))
        fingerprint = json.loads(table.schema.metadata[b"posttrain.fingerprint"])
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise corrupt(key, f"it cannot be read ({error})") from error
    return table.replace_schema_metadata(None), fingerprint


def corrupt(key: str, what: str) -> ObjectCorrupt:
    return ObjectCorrupt(
        f"object {key!r} is damaged: {what}. Nothing was overwritten. Restore it from a copy; "
        "a table that no manifest names yet may be deleted instead, then its stage makes it again"
    )


def _around_seal(data: bytes) -> tuple[bytes, bytes]:
    """The bytes before the seal's digits and those after them. The footer's entries come after all the columns'."""
    start = data.rfind(_SEAL) + len(_SEAL)
    return data[:start], data[start + len(_UNSEALED) :]


def _seal(before: bytes, after: bytes) -> bytes:
    digest = hashlib.sha256(before)
    digest.update(_UNSEALED)
    digest.update(after)
    return digest.hexdigest().encode()
