"""SQL over a run: DuckDB in memory, without files, network or extensions.

    rollouts     one row per rollout with its verdict (reward, outcome, flags, breakdown, evidence) and execution_status
    executions, verdicts, samples, plan     as the stages wrote them; rollout_rows: rollouts as generate wrote them
    iterations   one row per verified iteration with the metrics of its verdicts and of its update
    evaluations  one row per evaluated policy version and domain ("" is all of them)
    telemetry    one row per computation: iteration, purpose, stage, shard, host, process, started, ended

All but the last three have the columns `iteration` (of an evaluation: the policy version) and `purpose`; a query that
compares them with values opens nothing else. DuckDB asks for the columns and rows that it needs of a table, and they
are read through our store: one set of credentials, and what was read is counted there.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from posttrain_core.errors import ConfigError
from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.evaluation import evaluations
from posttrain_core.inspect.metrics import held_out_passes, iteration_metrics
from posttrain_core.inspect.tables import scan, views
from posttrain_core.inspect.timeline import intervals

_LOCKED: dict[str, Any] = {
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "lock_configuration": True,
}
_WORD = re.compile(r"\w+")


def sql(run: Run, query: str, parameters: Sequence[Any] = ()) -> pa.Table:
    """The answer to a query; only what it asks for is read. ConfigError with DuckDB's message when it is wrong."""
    named = set(_WORD.findall(query.lower()))
    failures: list[Exception] = []
    with _errors(failures), closing(duckdb.connect(config=_LOCKED)) as connection:
        for name in named & views().keys():
            connection.register(name, _Asked(run, name, failures))
        for name in named & _COMPUTED.keys():
            connection.register(name, _COMPUTED[name](run))
        return _interruptible(connection, lambda: _answer(connection, query, list(parameters)))


def pick(
    run: Run, columns: Sequence[str], where: str, parameters: Sequence[Any], order: str, limit: int = 0, start: int = 0
) -> pa.Table:
    """Rows of `rollouts` in an order, from place `start` on; `where` ("" is all) and `order` are SQL; no limit is 0.
    Which rows is decided by the columns that those two name; the others are read of these rows alone."""
    first = f"select rollout_id, iteration, purpose from rollouts {'where' if where else ''} {where} order by {order}"
    places = sql(run, f"{first} limit {limit} offset {start}" if limit else f"{first} offset {start}", parameters)
    ids, iterations, purposes = (places[name].combine_chunks() for name in places.column_names)
    chosen = {"iteration": iterations.unique().to_pylist(), "purpose": purposes.unique().to_pylist()}
    rows = run.rollouts(*dict.fromkeys(["rollout_id", *columns]), **chosen)
    table = (rows.where(rollout_id=ids.to_pylist()) if limit else rows).to_table()
    return table.take(pc.index_in(ids, table["rollout_id"].combine_chunks())).select(list(columns))


def table_names() -> list[str]:
    return [*views(), *_COMPUTED]


class _Asked(ds.FileSystemDataset):  # type: ignore[misc]  # it has no types
    """What DuckDB takes for a dataset: it asks for a scanner of some columns, and of the rows that match a filter as
    far as Arrow can say it. What goes wrong meanwhile is kept in `failures`; DuckDB would keep only its text."""

    def __init__(self, run: Run, name: str, failures: list[Exception]) -> None:
        self._run, self._view, self._failures = run, views()[name], failures
        super().__init__([], self._view.schema, ds.ParquetFileFormat())

    def scanner(self, columns: list[str] | None = None, filter: ds.Expression | None = None) -> "_Scanner":
        names = self._view.schema.names if columns is None else columns
        schema = pa.schema([self._view.schema.field(name) for name in names])
        return _Scanner(schema, self._batches(names, filter))

    def _batches(self, columns: list[str], where: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        try:
            yield from scan(self._run, self._view, columns, where)
        except Exception as error:
            self._failures.append(error)
            raise


@dataclass(frozen=True)
class _Scanner:
    """All that DuckDB wants of a scanner. Arrow's own would read ahead in threads that outlive the query."""

    projected_schema: pa.Schema
    batches: Iterator[pa.RecordBatch]

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self.batches)


def _answer(connection: duckdb.DuckDBPyConnection, query: str, parameters: list[Any]) -> pa.Table:
    found = connection.sql(query, params=parameters)
    return pa.table({}) if found is None else found.to_arrow_table()


def _interruptible(connection: duckdb.DuckDBPyConnection, work: Callable[[], pa.Table]) -> pa.Table:
    """In another thread: while DuckDB works in this one, Ctrl-C would not be heard."""
    with ThreadPoolExecutor(1, thread_name_prefix="sql") as pool:
        pending = pool.submit(work)
        try:
            return pending.result()
        except KeyboardInterrupt:
            while not pending.done():  # it may not have begun yet, and an interrupt then is lost
                connection.interrupt()
                wait([pending], timeout=0.05)
            raise


@contextmanager
def _errors(failures: list[Exception]) -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        if failures:  # not the query's fault
            raise failures[0] from None
        raise ConfigError(f"{error}\nThe tables are {', '.join(table_names())}") from error


def _iterations(run: Run) -> pa.Table:
    rows = iteration_metrics(run)
    names = sorted({"reward_mean", "pass_rate", *(name for row in rows for name in row)} - {"iteration"})
    columns = {"iteration": pa.array([row["iteration"] for row in rows], pa.int64())}
    return pa.table(columns | {name: pa.array([row.get(name) for row in rows], pa.float64()) for name in names})


def _evaluations(run: Run) -> pa.Table:
    names = {"version": pa.int64(), "domain": pa.string(), "num_problems": pa.int64(), "num_rollouts": pa.int64()}
    schema = pa.schema(names | dict.fromkeys(("pass_rate", "low", "high"), pa.float64()))
    return pa.Table.from_pylist([asdict(row) for row in evaluations(held_out_passes(run))], schema=schema)


def _telemetry(run: Run) -> pa.Table:
    names = {"iteration": pa.int64(), "purpose": pa.string(), "stage": pa.string(), "shard": pa.int64()}
    names |= {"host": pa.string(), "process": pa.string(), "started": pa.float64(), "ended": pa.float64()}
    return pa.Table.from_pylist([asdict(interval) for interval in intervals(run)], schema=pa.schema(names))


_COMPUTED: dict[str, Callable[[Run], pa.Table]] = {
    "iterations": _iterations,
    "evaluations": _evaluations,
    "telemetry": _telemetry,
}
