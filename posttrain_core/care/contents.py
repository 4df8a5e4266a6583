"""Objects against what their manifest says of them: bytes, digest, and of tables seal, schema and rows."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from posttrain_core import layout
from posttrain_core.care.findings import Finding
from posttrain_core.errors import ObjectCorrupt, ObjectNotFound, PosttrainError
from posttrain_core.manifest import ObjectRef, file_digest
from posttrain_core.schema import SCHEMA_VERSION, arrow_schema, from_parquet
from posttrain_core.store.protocol import ObjectStore

_PART_BYTES = 1 << 24
_COPY = "Put it back from a copy"


@dataclass(frozen=True)
class Seen:
    """An object as it is. Of a table that could be read, the columns that others are compared with."""

    digest: str
    num_bytes: int
    problem: str = ""  # of the table itself
    num_rows: int = -1
    fingerprint: Mapping[str, Any] | None = None
    ids: pa.ChunkedArray | None = None
    outcomes: Mapping[str, int] | None = None
    groups: int = 0
    reward_sum: float = 0.0  # of judged rollouts


def look_at(store: ObjectStore, ref: ObjectRef, run: str) -> Seen | Finding:
    """Read an object whole; a Finding when it cannot be read."""
    try:
        if ref.num_rows < 0:
            return _look_at_file(store, ref)
        data = store.get(ref.key)
    except ObjectNotFound:
        owner = layout.run_of(ref.key)
        whose = f" It lies with run {owner!r}, from which this one was forked" if owner != run else ""
        return Finding(ref.key, f"it is gone, but a manifest names it ({ref.num_bytes} bytes).{whose}", _COPY)
    except PosttrainError as error:
        return Finding(ref.key, f"it cannot be read: {error}", "See to the store, then check again")
    return _look_at_table(data, ref)


def check_contents(refs: Mapping[str, ObjectRef], seen: Mapping[str, Seen | Finding]) -> list[Finding]:
    """Each object against its reference."""
    owners = {ref.digest: key for key, ref in refs.items()}
    findings = []
    for key, item in seen.items():
        if isinstance(item, Finding):
            findings.append(item)
        elif finding := _compare(refs[key], item, owners):
            findings.append(finding)
    return findings


def _compare(ref: ObjectRef, seen: Seen, owners: Mapping[str, str]) -> Finding | None:
    if seen.digest == ref.digest:
        if seen.problem:
            return Finding(ref.key, seen.problem, _COPY)
        if seen.num_rows != ref.num_rows:
            what = f"it has {seen.num_rows} rows; its manifest says {ref.num_rows}"
            return Finding(ref.key, what, "The manifest was edited. Put the manifest back from a copy")
        return None
    if other := owners.get(seen.digest):
        return Finding(ref.key, f"it holds the bytes of {other}: objects were swapped or copied over", _COPY)
    what = f"its {seen.num_bytes} bytes have the digest {seen.digest[:12]}; its manifest says {ref.num_bytes} bytes "
    what += f"and {ref.digest[:12]}"
    if ref.num_rows >= 0 and seen.problem:
        what += ", and its own seal does not fit either: it is damaged"
    elif ref.num_rows >= 0:
        what += f". Its own seal fits: it was written anew, with {seen.num_rows} rows in place of {ref.num_rows}"
    return Finding(ref.key, what, _COPY)


def _look_at_file(store: ObjectStore, ref: ObjectRef) -> Seen:
    path = store.local_path(ref.key)
    if path is not None:
        if not path.is_file():
            raise ObjectNotFound(ref.key)
        return Seen(file_digest(path), path.stat().st_size)
    digest, position = hashlib.sha256(), 0
    while part := store.get_range(ref.key, position, _PART_BYTES):
        digest.update(part)
        position += len(part)
    return Seen(digest.hexdigest(), position)


def _look_at_table(data: bytes, ref: ObjectRef) -> Seen:
    digest = hashlib.sha256(data).hexdigest()
    try:
        table, fingerprint = from_parquet(data, ref.key)
    except ObjectCorrupt as error:
        return Seen(digest, len(data), str(error).partition(". Nothing was")[0])
    version = fingerprint.get("schema")
    if version != SCHEMA_VERSION:
        problem = f"it was written with schema version {version}; this program reads {SCHEMA_VERSION}"
        return Seen(digest, len(data), problem, table.num_rows, fingerprint)
    problem = "" if table.schema.equals(arrow_schema(_table_of(ref.key))) else _schema_problem(table, ref.key)
    if problem or "rollout_id" not in table.column_names:
        return Seen(digest, len(data), problem, table.num_rows, fingerprint)
    outcomes, reward = None, 0.0
    if "reward" in table.column_names and "outcome" in table.column_names:
        counts = pc.value_counts(table["outcome"]).to_pylist()
        outcomes = {entry["values"]: entry["counts"] for entry in counts}
        judged = pc.is_in(table["outcome"], pa.array(["scored", "truncated"]))
        reward = pc.sum(table["reward"].filter(judged)).as_py() or 0.0
    groups = pc.count_distinct(table["group_id"]).as_py() if "group_id" in table.column_names else 0
    return Seen(digest, len(data), "", table.num_rows, fingerprint, table["rollout_id"], outcomes, groups, reward)


def _table_of(key: str) -> str:
    parts = key.split("/")[2:]
    return parts[1] if parts[0] in ("eval", "audit") else parts[0]


def _schema_problem(table: pa.Table, key: str) -> str:
    expected = arrow_schema(_table_of(key))
    names = [field.name for field in expected if field not in table.schema] + [
        name for name in table.column_names if name not in expected.names
    ]
    return f"its columns are not those of this table: {', '.join(names) or 'in another order'}"
