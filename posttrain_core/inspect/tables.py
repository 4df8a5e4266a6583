"""The tables of a run: which committed objects hold what is asked for, and their rows, streamed.

Row k of a shard is about the same rollout in every table but `samples`: each stage works through its input in order. So
the view `rollouts` needs no join: it lays columns of several tables side by side, and reads those that are asked for.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property

import pyarrow as pa
import pyarrow.dataset as ds

from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.filters import Filter, span, statistics
from posttrain_core.inspect.parquet import ParquetObject
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, ObjectRef
from posttrain_core.schema import arrow_schema, corrupt

STAGE_OF_TABLE = {
    "plan": "plan",
    "rollouts": "generate",
    "executions": "execute",
    "verdicts": "verify",
    "samples": "update",
}
RAW_ROLLOUTS = "rollout_rows"
_NUM_SHARDS = 16  # read at once
_NUM_PARTS = 16  # requests for parts of objects at once
_PLACE = ("iteration", "purpose")

Source = tuple[str, str]  # a table and a column of it


@dataclass(frozen=True)
class View:
    """Rows of the table `base`. A column comes from the first of its sources whose stage is committed, else is null."""

    base: str
    sources: Mapping[str, tuple[Source, ...]]

    @cached_property
    def schema(self) -> pa.Schema:
        """`iteration` (of an evaluation: the policy version) and `purpose`, then the columns."""
        fields = [pa.field("iteration", pa.int64()), pa.field("purpose", pa.string())]
        for name, sources in self.sources.items():
            fields.append(pa.field(name, arrow_schema(sources[0][0]).field(sources[0][1]).type))
        return pa.schema(fields)


@cache
def views() -> dict[str, View]:
    """By name: each table as its stage wrote it, but for `rollouts`, which are shown with their verdicts and the status
    of their execution; what generate alone knew of them is `rollout_rows`."""
    found = {name: View(name, _sources(name)) for name in STAGE_OF_TABLE}
    found[RAW_ROLLOUTS] = found["rollouts"]
    judged = {name: (("verdicts", name),) for name in ("reward", "flags", "breakdown", "evidence")}
    sources = {name: source for name, source in _sources("rollouts").items() if name != "outcome"}
    sources["outcome"] = (("verdicts", "outcome"), ("rollouts", "outcome"))
    sources |= judged | {"execution_status": (("executions", "status"),)}
    return found | {"rollouts": View("rollouts", sources)}


def _sources(table: str) -> dict[str, tuple[Source, ...]]:
    return {name: ((table, name),) for name in arrow_schema(table).names if name not in _PLACE}


def scan(run: Run, view: View, columns: Sequence[str], where: ds.Expression | None) -> Iterator[pa.RecordBatch]:
    """The rows that match, in order. Manifests and objects in which nothing can match are not opened; of the others
    only the columns that are asked for or that `where` looks at are read."""
    rows = Filter(where, view.schema)
    wanted = list(dict.fromkeys([*columns, *rows.columns]))
    with ThreadPoolExecutor(_NUM_SHARDS, "shard") as pool, ThreadPoolExecutor(_NUM_PARTS, "part") as parts:
        waiting: deque[Future[pa.Table]] = deque()
        try:
            for shard in _shards(run, view, wanted, rows):
                waiting.append(pool.submit(shard.read, rows, columns, parts))
                if len(waiting) > _NUM_SHARDS:
                    yield from waiting.popleft().result().to_batches()
            while waiting:
                yield from waiting.popleft().result().to_batches()
        finally:
            for left in waiting:
                left.cancel()


def read(run: Run, name: str, columns: Sequence[str] | None = None, where: ds.Expression | None = None) -> pa.Table:
    """Rows of a view. ObjectCorrupt names the object that is damaged."""
    view = views()[name]
    names = view.schema.names if columns is None else list(columns)
    schema = pa.schema([view.schema.field(column) for column in names])
    return pa.Table.from_batches(scan(run, view, names, where), schema)


@dataclass(frozen=True)
class _Shard:
    """One shard of a scope: the object of each table that has to be read, and where each wanted column is."""

    scope: Scope
    schema: pa.Schema  # of the wanted columns
    num_rows: int
    objects: Mapping[str, ParquetObject]
    sources: Mapping[str, Source]

    def read(self, rows: Filter, columns: Sequence[str], parts: ThreadPoolExecutor) -> pa.Table:
        groups = self._groups(rows)
        if groups is not None and not groups:
            return self.schema.empty_table().select(list(columns))
        table = self._read(groups, parts)
        if not rows.is_about_places:
            table = table.filter(rows.expression)
        return table.select(list(columns))

    def _groups(self, rows: Filter) -> list[int] | None:
        """The row groups in which anything can match; None is all. They are told apart only where the objects are cut
        at the same rows."""
        if rows.is_about_places:  # then it is known to match
            return None
        cuts = {tuple(_group_sizes(known)) for known in self.objects.values()}
        if len(cuts) != 1:
            return None
        sizes = next(iter(cuts))
        return [group for group in range(len(sizes)) if rows.admits(self._guarantee(group, rows.columns))]

    def _guarantee(self, group: int, columns: Sequence[str]) -> ds.Expression:
        known = span(self.scope.purpose, self.scope.iteration, self.scope.iteration)
        for table, found in self.objects.items():
            here = [name for name in columns if self.sources.get(name) == (table, name)]
            for part in statistics(found.footer.row_group(group), here):
                known &= part
        return known

    def _read(self, groups: list[int] | None, parts: ThreadPoolExecutor) -> pa.Table:
        tables = {}
        for name, found in self.objects.items():
            columns = [column for table, column in self.sources.values() if table == name]
            chosen = list(range(found.footer.num_row_groups)) if groups is None else groups
            tables[name] = found.read(columns, chosen, parts.map)
        num_rows = next((table.num_rows for table in tables.values()), self.num_rows)
        arrays = []
        for field in self.schema:
            if field.name in self.sources:
                table, column = self.sources[field.name]
                arrays.append(tables[table][column])
            else:
                arrays.append(pa.repeat(pa.scalar(self._constant(field.name), field.type), num_rows))
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def _constant(self, name: str) -> int | str | None:
        known: dict[str, int | str] = {"iteration": self.scope.iteration, "purpose": str(self.scope.purpose)}
        return known.get(name)


def _group_sizes(found: ParquetObject) -> list[int]:
    footer = found.footer
    return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]


def _shards(run: Run, view: View, wanted: Sequence[str], rows: Filter) -> Iterator[_Shard]:
    tables = {view.base} | {table for name in wanted for table, _ in view.sources.get(name, ())}
    committed_by_stage = run.committed_where({STAGE_OF_TABLE[table] for table in tables}, rows)
    manifests = {table: committed_by_stage[STAGE_OF_TABLE[table]] for table in tables}
    schema = pa.schema([view.schema.field(name) for name in wanted])
    for scope, base in manifests[view.base].items():
        committed = {table: _objects(found[scope]) for table, found in manifests.items() if scope in found}
        sources: dict[str, Source] = {}
        for name in wanted:
            known = [source for source in view.sources.get(name, ()) if source[0] in committed]
            sources |= {name: known[0]} if known else {}
        needed = {table for table, _ in sources.values()}
        for place, ref in enumerate(_objects(base)):
            beside = {table: _beside(ref, committed[table], place) for table in needed}
            objects = {table: ParquetObject(run.store, found, run.footers) for table, found in beside.items()}
            yield _Shard(scope, schema, ref.num_rows, objects, sources)


def _objects(manifest: Manifest) -> list[ObjectRef]:
    return [ref for ref in manifest.objects if ref.num_rows >= 0]


def _beside(base: ObjectRef, refs: list[ObjectRef], place: int) -> ObjectRef:
    """The object of another table for the same shard."""
    if place >= len(refs) or refs[place].num_rows != base.num_rows:
        found = f"{refs[place].key!r} has {refs[place].num_rows}" if place < len(refs) else "a later stage has no shard"
        raise corrupt(base.key, f"it has {base.num_rows} rows, but {found}")
    return refs[place]
