"""Rows of a run that are not read yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds

from posttrain_core.errors import ConfigError
from posttrain_core.inspect.filters import Filter
from posttrain_core.inspect.tables import View, scan, views

if TYPE_CHECKING:
    import pandas as pd

    from posttrain_core.inspect.catalogue import Run


@dataclass(frozen=True)
class Rows:
    """Rows of a view: columns and conditions are chosen first, and only what they need is then read.

        rows = run.rollouts(domain="program").where(pyarrow.dataset.field("reward") < 1)
        rows.count(); rows.select("rollout_id", "text").to_pandas(); for batch in rows: ...

    Each reading reads anew. Rows come by purpose, iteration, shard and place in it.
    """

    run: Run
    view: str
    columns: tuple[str, ...] | None = None
    condition: ds.Expression | None = field(default=None, compare=False)

    @property
    def schema(self) -> pa.Schema:
        known = self._view.schema
        return known if self.columns is None else pa.schema([known.field(name) for name in self.columns])

    def select(self, *columns: str) -> Rows:
        self._check(columns)
        return Rows(self.run, self.view, columns, self.condition)

    def where(self, condition: ds.Expression | None = None, /, **equal: Any) -> Rows:
        """Those in which the condition holds and each of the columns has the value, or one of the values."""
        self._check(equal)
        parts = [] if condition is None else [condition]
        parts += [_equal(self._view.schema.field(name), value) for name, value in equal.items()]
        both = self.condition
        for part in parts:
            both = part if both is None else both & part
        Filter(both, self._view.schema).check()
        return Rows(self.run, self.view, self.columns, both)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return scan(self.run, self._view, self.schema.names, self.condition)

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_table(self) -> pa.Table:
        return pa.Table.from_batches(self, self.schema)

    def to_pandas(self) -> pd.DataFrame:
        frame: pd.DataFrame = self.to_table().to_pandas(maps_as_pydicts="strict")
        return frame

    def to_pylist(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.to_table().to_pylist(maps_as_pydicts="strict")
        return rows

    def count(self) -> int:
        return sum(batch.num_rows for batch in self.select("iteration"))

    @property
    def _view(self) -> View:
        return views()[self.view]

    def _check(self, columns: Iterable[str]) -> None:
        known = self._view.schema.names
        for name in columns:
            if name not in known:
                nearest = get_close_matches(name, known, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(known)}"
                raise ConfigError(f"{self.view} have no column {name!r}; {hint}")


def _equal(column: pa.Field, value: Any) -> ds.Expression:
    try:
        if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
            return ds.field(column.name).isin(pa.array(list(value), column.type))
        return ds.field(column.name) == pa.scalar(value, column.type)
    except (pa.ArrowException, TypeError) as error:
        raise ConfigError(f"column {column.name!r} is of type {column.type}: {value!r} is none") from error
