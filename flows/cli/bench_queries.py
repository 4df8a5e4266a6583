"""The measurement of queries on the terminal."""

import json
import tempfile
import time
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

from flows.bench_queries import QueryTime, measure_queries
from flows.synthetic_run import Size, write_run


def bench_queries(console: Console, as_json: bool, size: Size | None = None) -> None:
    """Write a made-up run into a temporary folder and ask it. By default: a million rollouts, about 0.5 GB."""
    size = size or Size()
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        console.print(f"writing {size.num_rollouts:,} rollouts to {folder} ...", highlight=False)
        began = time.perf_counter()
        write_run(folder, "synthetic", size)
        console.print(f"written in {time.perf_counter() - began:.1f} s", highlight=False)
        found = measure_queries(folder, "synthetic")
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in found], indent=1))
        return
    Console().print(_table(found, size))


def _table(found: list[QueryTime], size: Size) -> Table:
    table = Table(title=f"Queries over {size.num_rollouts:,} rollouts; seconds, medians")
    for heading in ("", "query", "CPU", "whole process", "CPU", "rows", "MiB read", "requests"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in found:
        times = (row.seconds, row.cpu_seconds, row.cold_seconds, row.cold_cpu_seconds)
        read = (f"{row.num_rows}", f"{row.num_bytes / 2**20:.2f}", f"{row.num_requests}")
        table.add_row(row.name, *(f"{seconds:.2f}" for seconds in times), *read)
    return table
