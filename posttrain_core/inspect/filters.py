"""What a filter says about rows before any of them is read: which columns it needs, and where nothing can match.

The work is Arrow's: a filter is simplified by what is known of all rows of a place (its *guarantee*), and a place
where it comes to false need not be looked at.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from posttrain_core.errors import ConfigError
from posttrain_core.layout import Scope
from posttrain_core.records import Purpose

_FORMAT = ds.ParquetFileFormat()
_NOTHING = pa.allocate_buffer(0)
_LAST = (1 << 20) - 1  # no run has more iterations
_SPELLED_OUT = 8  # so many iterations are asked for one by one; more are listed


class Filter:
    """An Arrow expression over the columns of `schema`; None admits every row."""

    def __init__(self, expression: ds.Expression | None, schema: pa.Schema) -> None:
        self.expression = expression
        self._schema = schema

    @cached_property
    def columns(self) -> list[str]:
        """The columns that the filter looks at: those without which it means nothing."""
        if self.expression is None:
            return []
        names = enumerate(self._schema.names)
        return [name for place, name in names if self._wrong_for(self._schema.remove(place))]

    def check(self) -> None:
        """ConfigError, with what Arrow says, when the expression makes no sense for these columns."""
        if self.expression is not None and (wrong := self._wrong_for(self._schema)):
            raise ConfigError(f"{wrong}; the columns are {', '.join(self._schema.names)}")

    @cached_property
    def is_about_places(self) -> bool:
        """Whether the iteration and the purpose alone decide, so that the rows of an admitted place all match."""
        return set(self.columns) <= {"iteration", "purpose"}

    def admits(self, guarantee: ds.Expression) -> bool:
        """False when no row for which the guarantee holds can match."""
        if self.expression is None:
            return True
        place = _FORMAT.make_fragment(pa.BufferReader(_NOTHING), partition_expression=guarantee)
        return bool(list(ds.FileSystemDataset([place], self._schema, _FORMAT).get_fragments(self.expression)))

    def iterations(self, purpose: Purpose) -> list[int]:
        """The iterations that the filter admits, in order: all of them where they are few, else only the first ones."""
        found: list[int] = []
        for iteration in self._admitted(purpose, 0, _LAST):
            found.append(iteration)
            if len(found) > _SPELLED_OUT:
                break
        return found

    def spells_out(self, iterations: list[int]) -> bool:
        """Whether these, from `iterations`, are all."""
        return len(iterations) <= _SPELLED_OUT

    def admits_scope(self, scope: Scope) -> bool:
        return self.admits(span(scope.purpose, scope.iteration, scope.iteration))

    def ends_before(self, scope: Scope) -> bool:
        """Whether neither this iteration nor any later one is admitted."""
        return not self.admits(span(scope.purpose, scope.iteration, _LAST))

    def _admitted(self, purpose: Purpose, first: int, last: int) -> Iterator[int]:
        if not self.admits(span(purpose, first, last)):
            return
        if first == last:
            yield first
            return
        middle = (first + last) // 2
        yield from self._admitted(purpose, first, middle)
        yield from self._admitted(purpose, middle + 1, last)

    def _wrong_for(self, schema: pa.Schema) -> str:
        """Why the expression makes no sense for other columns; "" when it does."""
        try:
            list(ds.FileSystemDataset([], schema, _FORMAT).get_fragments(self.expression))
        except pa.ArrowException as error:
            return str(error).partition("\n")[0]
        return ""


def span(purpose: Purpose, first: int, last: int) -> ds.Expression:
    """What holds for the rows of these iterations."""
    iteration = ds.field("iteration")
    inside = iteration == first if first == last else (iteration >= first) & (iteration <= last)
    return inside & (ds.field("purpose") == str(purpose))


def statistics(group: pq.RowGroupMetaData, columns: list[str]) -> Iterator[ds.Expression]:
    """What a row group's statistics say about those of the columns that have them (no lists, no structs)."""
    for place in range(group.num_columns):
        column = group.column(place)
        found: Any = column.statistics if column.path_in_schema in columns else None
        if found is not None and found.has_min_max and found.null_count == 0:
            field = ds.field(column.path_in_schema)
            yield (field >= found.min) & (field <= found.max)
