"""What a demo run came to: the report, attempts before and after, and what to try next."""

import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.reporting import print_report
from flows.cli.run import program
from posttrain_core.inspect import charts
from posttrain_core.inspect.catalogue import Run, open_run
from posttrain_core.inspect.report import report
from posttrain_core.inspect.samples import Attempt, held_out_attempts
from posttrain_core.inspect.text import visible

_NUM_SHOWN = 3


def print_results(console: Console, store: str, name: str, picture: Path) -> None:
    """Everything that the demo ends with; the curve also as a PNG."""
    run = open_run(store, name)
    found = report(run)
    charts.png(found, picture)
    print_report(found)
    console.print(attempts_table(run))
    console.print(f"Curve: {picture}\n\nTry next:", highlight=False)
    for command in next_commands(run, store):
        console.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)


def attempts_table(run: Run) -> Table:
    """The first attempt at the first held-out problems, under the first and the last version."""
    first, last = run.evaluations[0], run.evaluations[-1]
    table = Table(title=f"First attempts at held-out problems, version {first} and version {last}", show_lines=True)
    for heading in ("problem", f"version {first}", f"version {last}"):
        table.add_column(heading, overflow="fold")
    before = held_out_attempts(run, first)
    after = {attempt.problem_id: attempt for attempt in held_out_attempts(run, last)}
    for attempt in before[:_NUM_SHOWN]:
        table.add_row(Text(attempt.prompt), _outcome(attempt), _outcome(after[attempt.problem_id]))
    return table


def _outcome(attempt: Attempt) -> Text:
    return Text(f"{visible(attempt.text)}\nreward {attempt.reward:g}")


def next_commands(run: Run, store: str) -> list[str]:
    example = held_out_attempts(run, run.evaluations[-1])[0].rollout_id
    query = "select iteration, avg(reward) as reward from rollouts where purpose = 'train' group by 1 order by 1"
    where = f"--store {shlex.quote(store)}"
    return [
        f"{program()} show {example} {where}",
        f'{program()} sql "{query}" {where}',
        f"{program()} resume {run.name} {where} --set iterations={run.config.iterations * 2}",
    ]
