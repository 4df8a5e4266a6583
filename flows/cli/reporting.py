"""A report on the terminal; the demo ends with it too."""

import shutil
import sys

import typer

from flows.cli.output import print_table
from posttrain_core.errors import ConfigError
from posttrain_core.inspect import charts
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
