"""Tables: every record comes back as it was, the bytes are a function of the rows, damage is always noticed."""

import dataclasses
import hashlib
import json
import types
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_core.errors import ObjectCorrupt
from posttrain_core.records import Message, Problem, Split
from posttrain_core.schema import (
    SCHEMA_VERSION,
    TABLES,
    arrow_schema,
    from_parquet,
    from_table,
    parse_problem,
    problem_json,
    to_parquet,
    to_table,
)

# The digest of all schemas at each version. A changed schema needs a new version: stored tables of the old one are
# then refused by name and not misread.
SCHEMAS = {1: "13b87b6ee96526cb", 2: "4577bf678ecdfc7b"}

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NARROW = {"loss_mask": st.integers(0, 1), "prompt_ids": st.integers(0, 2**31 - 1)}
NARROW |= {"response_ids": NARROW["prompt_ids"], "input_ids": NARROW["prompt_ids"]}
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
}


def values(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Anything that a field of this annotation may hold."""
    origin = get_origin(hint)
    if origin is tuple:
        return st.lists(NARROW[name] if name in NARROW else values(get_args(hint)[0]), max_size=4).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(*(values(argument) for argument in get_args(hint)), max_size=3)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return records(hint) if dataclasses.is_dataclass(hint) else SCALARS[hint]


def records(record: Any) -> st.SearchStrategy[Any]:
    return st.builds(record, **{name: values(hint, name) for name, hint in get_type_hints(record).items()})


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_records_come_back_as_they_were(name: str, data: st.DataObject) -> None:
    rows = data.draw(st.lists(records(TABLES[name]), max_size=4))
    table = to_table(name, rows)
    assert from_table(TABLES[name], table) == rows
    stored = to_parquet(table, {"input.plan": "abc", "config.seed": 1})
    found, fingerprint = from_parquet(stored, "key")
    assert from_table(TABLES[name], found) == rows
    assert found.schema == arrow_schema(name)
    assert fingerprint == {"input.plan": "abc", "config.seed": 1}
    assert to_parquet(to_table(name, rows), {"config.seed": 1, "input.plan": "abc"}) == stored


@pytest.mark.parametrize("name", TABLES)
def test_fields_come_back_in_types_that_copy_and_compare(name: str) -> None:
    (row,) = from_table(TABLES[name], to_table(name, [example(TABLES[name])]))
    assert row == example(TABLES[name])
    assert dataclasses.asdict(row) == dataclasses.asdict(example(TABLES[name]))
    assert all(not isinstance(value, list | types.MappingProxyType) for value in vars(row).values())


def example(record: Any) -> Any:
    """One row of a record, every field filled."""

    def value(hint: Any) -> Any:
        origin = get_origin(hint)
        if origin is tuple:
            return (value(get_args(hint)[0]),) * 2
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"a name": value(get_args(hint)[1])}
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            return next(iter(hint))
        return example(hint) if dataclasses.is_dataclass(hint) else {str: "text", int: 1, float: 0.5, bool: True}[hint]

    return record(**{name: value(hint) for name, hint in get_type_hints(record).items()})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
PROBLEMS = st.builds(
    Problem,
    id=TEXT,
    domain=TEXT,
    split=st.sampled_from(Split),
    prompt=st.lists(records(Message), max_size=3).map(tuple),
    payload=st.dictionaries(TEXT, JSON, max_size=3),
    hidden=st.dictionaries(TEXT, JSON, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(PROBLEMS)
def test_problems_come_back_as_they_were(problem: Problem) -> None:
    assert parse_problem(problem_json(problem)) == problem
    assert problem_json(parse_problem(problem_json(problem))) == problem_json(problem)


def test_other_readers_see_the_same_rows(tmp_path: Any) -> None:
    rows = [dataclasses.replace(example(TABLES["verdicts"]), rollout_id=f"r{n}", reward=n / 4) for n in range(4)]
    path = tmp_path / "shard=0000.parquet"
    path.write_bytes(to_parquet(to_table("verdicts", rows), {}))
    with duckdb.connect() as connection:
        found = connection.execute(f"select rollout_id, reward, breakdown['a name'] from '{path}'").fetchall()
    assert found == [(row.rollout_id, row.reward, 0.5) for row in rows]


@pytest.fixture(scope="module")
def stored() -> bytes:
    return to_parquet(to_table("samples", [example(TABLES["samples"])] * 3), {"config.seed": 1})


def test_every_flipped_bit_is_noticed(stored: bytes) -> None:
    for place in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[place] ^= 1 << bit
            with pytest.raises(ObjectCorrupt, match="'runs/some/key'"):
                from_parquet(bytes(damaged), "runs/some/key")


def test_every_truncation_and_addition_is_noticed(stored: bytes) -> None:
    for length in range(len(stored)):
        with pytest.raises(ObjectCorrupt, match="'runs/some/key'"):
            from_parquet(stored[:length], "runs/some/key")
    for other in (b"", b"PAR1", stored + b"\0", b"\0" + stored, stored + stored, b"\0" * len(stored)):
        with pytest.raises(ObjectCorrupt):
            from_parquet(other, "runs/some/key")


def test_the_seal_is_not_taken_from_the_rows() -> None:
    """A policy can write what a seal looks like; it is found in the footer all the same."""
    rows = [dataclasses.replace(example(TABLES["demonstrations"]), response="posttrain.sha256:" + "0" * 64)] * 2
    stored = to_parquet(to_table("demonstrations", rows), {"config.note": "posttrain.sha256:" + "0" * 64})
    assert from_table(TABLES["demonstrations"], from_parquet(stored, "key")[0]) == rows


def test_values_out_of_range_are_refused() -> None:
    row = dataclasses.replace(example(TABLES["samples"]), input_ids=(2**31,))
    with pytest.raises(pa.ArrowInvalid):
        to_table("samples", [row])


def test_a_changed_schema_has_a_new_version() -> None:
    described = {name: [str(field) for field in arrow_schema(name)] for name in TABLES}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    assert SCHEMAS.get(SCHEMA_VERSION) == digest, (
        f"The schemas changed: set SCHEMA_VERSION in posttrain_core/schema.py to {SCHEMA_VERSION + 1} and add "
        f"{SCHEMA_VERSION + 1}: {digest!r} to SCHEMAS here. Runs of the old version are then refused with a message "
        "instead of being misread."
    )
