"""SQL over a run: DuckDB in memory, without files, network or extensions.

    rollouts     one row per rollout with its verdict (reward, outcome, flags, breakdown, evidence) and execution_status
    executions, verdicts, samples, plan     as the stages wrote them
    iterations   one row per verified iteration with the metrics of its verdicts and of its update
    evaluations  one row per evaluated policy version and domain ("" is all of them)
    telemetry    one row per computation: iteration, purpose, stage, shard, host, process, started, ended

The first five have the columns `iteration` (of an evaluation: the policy version) and `purpose`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

import duckdb
import pyarrow as pa

from posttrain_core.errors import ConfigError
from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.evaluation import evaluations
from posttrain_core.inspect.metrics import held_out_passes, iteration_metrics
from posttrain_core.inspect.tables import STAGE_OF_TABLE, check_objects, dataset
from posttrain_core.inspect.timeline import intervals

_LOCKED: dict[str, Any] = {
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "lock_configuration": True,
}
_WRONG_QUERY = (
    duckdb.ParserException,
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.PermissionException,
)
_WORD = re.compile(r"\w+")
_ROLLOUTS = "rollout_rows"  # the table as generate wrote it, below the view `rollouts`
_VIEW = f"""
create view rollouts as
select r.* exclude (outcome), coalesce(v.outcome, r.outcome) as outcome, v.reward, v.flags, v.breakdown, v.evidence,
       e.status as execution_status
from {_ROLLOUTS} r left join verdicts v using (rollout_id) left join executions e using (rollout_id)
"""


def sql(run: Run, query: str, parameters: Sequence[Any] = ()) -> pa.Table:
    """The answer to a query; only what it names is loaded. ConfigError with DuckDB's message when it is wrong."""
    named = set(_WORD.findall(query.lower()))
    if "rollouts" in named:
        named |= {"verdicts", "executions"}
    with _errors(run, named), closing(duckdb.connect(config=_LOCKED)) as connection:
        _load(connection, run, named)
        return _interruptible(connection, lambda: _answer(connection, query, list(parameters)))


def table_names() -> list[str]:
    return [*STAGE_OF_TABLE, *_COMPUTED]


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
def _errors(run: Run, named: set[str]) -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        if not isinstance(error, _WRONG_QUERY):
            for name in sorted(named & STAGE_OF_TABLE.keys()):  # a damaged object is not the query's fault
                check_objects(run, name)
        raise ConfigError(f"{error}\nThe tables are {', '.join(table_names())}") from error


def _load(connection: duckdb.DuckDBPyConnection, run: Run, named: set[str]) -> None:
    for name in named & STAGE_OF_TABLE.keys():
        connection.register(_ROLLOUTS if name == "rollouts" else name, dataset(run, name))
    if "rollouts" in named:
        connection.execute(_VIEW)
    for name in named & _COMPUTED.keys():
        connection.register(name, _COMPUTED[name](run))


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
