"""Reports and comparisons on the terminal; the demo ends with a report too."""

import shutil
import sys

import typer

from flows.cli.output import print_table
from posttrain_core.errors import ConfigError
from posttrain_core.inspect import charts
from posttrain_core.inspect.diff import Diff, Pair, difference_line
from posttrain_core.inspect.report import Report, comparison_line, timing_line

_MAX_WIDTH = 100


def print_report(report: Report) -> None:
    """The curve, held-out pass rates by version, the comparison of the first version with the last, the time."""
    try:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        typer.echo(charts.terminal(report, width, colour=sys.stdout.isatty()))
    except ConfigError as error:  # the numbers do not need the chart's library
        typer.echo(str(error), err=True)
    if report.evaluations:
        print_table(
            ("version", "domain", "problems", "rollouts", "pass rate", "low", "high"),
            [
                (row.version, row.domain or "all", row.num_problems, row.num_rollouts, row.pass_rate, row.low, row.high)
                for row in report.evaluations
            ],
        )
        typer.echo("low and high: 95 % Wilson interval over rollouts\n")
    for comparison in report.comparisons:
        typer.echo(comparison_line(comparison))
    typer.echo(timing_line(report.timing))


def print_diff(found: Diff, limit: int) -> None:
    """The differences with their intervals, then the problems that gained and lost most."""
    typer.echo(f"A: run {found.run_a}, version {found.version_a}\nB: run {found.run_b}, version {found.version_b}\n")
    for row in found.differences:
        typer.echo(difference_line(row))
    alone = [f"{num} in {run} alone" for num, run in ((found.num_only_a, "A"), (found.num_only_b, "B")) if num]
    if alone:
        typer.echo(f"left out: {', '.join(alone)}")
    for title, pairs in (("gains", found.gains), ("losses", found.losses)):
        typer.echo(f"\n{title}: {len(pairs)} of {len(found.pairs)} problems")
        if shown := [_pair(pair) for pair in pairs[:limit]]:
            print_table(_PAIR_COLUMNS, shown)


_PAIR_COLUMNS = ("problem", "gain", "reward A", "reward B", "pass rate A", "pass rate B", "rollouts A", "rollouts B")


def _pair(pair: Pair) -> tuple[object, ...]:
    a, b = pair.a, pair.b
    rates = (a.reward, b.reward, a.pass_rate, b.pass_rate)
    return (pair.problem_id, f"{pair.gain:+.3f}", *rates, a.num_rollouts, b.num_rollouts)
