"""`posttrain bench --queries`: how fast a run of a million rollouts is looked at, in a local store."""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain_core.inspect import Run
from posttrain_core.inspect.query import sql

QUERIES = {
    "one iteration by domain and reward": (
        "select rollout_id, reward, text from rollouts "
        "where iteration = {middle} and purpose = 'train' and domain = 'program' and reward >= 0.75"
    ),
    "mean reward of every iteration": (
        "select iteration, avg(reward) as reward from rollouts where purpose = 'train' group by 1 order by 1"
    ),
    "mean reward by iteration and domain": (
        "select iteration, domain, avg(reward) as reward from rollouts "
        "where purpose = 'train' group by all order by all"
    ),
}
_NUM_TIMES = 5


@dataclass(frozen=True)
class QueryTime:
    """Seconds of wall and CPU time, medians: `cold` of a process from start to end, the others of the query alone, with
    nothing known of the run yet. `num_bytes` and `num_requests` is what one query reads of the store."""

    name: str
    query: str
    num_rows: int
    seconds: float
    cpu_seconds: float
    cold_seconds: float
    cold_cpu_seconds: float
    num_bytes: int
    num_requests: int


def measure_queries(store: str, run: str, num_times: int = _NUM_TIMES) -> list[QueryTime]:
    """Each query `num_times`, alone and as a command of its own."""
    middle = Run(store, run).config.iterations // 2
    return [measure_query(store, run, name, query.format(middle=middle), num_times) for name, query in QUERIES.items()]


def measure_query(store: str, name: str, title: str, query: str, num_times: int) -> QueryTime:
    walls, cpus = [], []
    for _ in range(num_times):
        run = Run(store, name)
        began, cpu = time.perf_counter(), time.process_time()
        found = sql(run, query)
        walls.append(time.perf_counter() - began)
        cpus.append(time.process_time() - cpu)
    command = (sys.executable, "-m", "flows.cli.main", "sql", query, "--store", store, "--run", name, "--json")
    cold = [_process(command) for _ in range(num_times)]
    return QueryTime(
        title,
        query,
        found.num_rows,
        statistics.median(walls),
        statistics.median(cpus),
        statistics.median(wall for wall, _ in cold),
        statistics.median(cpu for _, cpu in cold),
        run.store.num_bytes,
        run.store.num_requests,
    )


def _process(command: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu
