"""`posttrain demo`: a starting model made here, a warm start, forty iterations, and what came of them."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.config_file import load_config
from flows.cli.reporting import print_report
from flows.cli.run import Overrides, WithPrefect, execute
from posttrain_core.inspect import charts
from posttrain_core.inspect.catalogue import Run, open_run
from posttrain_core.inspect.report import report
from posttrain_core.inspect.samples import Attempt, held_out_attempts
from posttrain_core.inspect.text import visible

_EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.yaml"
_NUM_SHOWN = 3


def demo(
    folder: Annotated[Path, typer.Option(help="Where the model, the run and the picture go.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Of the model, the warm start and the run.")] = 0,
    overrides: Overrides = None,
    prefect: WithPrefect = True,
) -> None:
    """Train a small policy from nothing on this machine, and see it learn. Run it again to go on after a stop."""
    console, started = Console(), time.monotonic()
    model = folder / f"model-{seed}"
    forced = [f"run=demo-{seed}", f"store={folder / 'store'}", f"seed={seed}", f"model.path={model}"]
    config = load_config(_EXAMPLE, [*forced, *(overrides or [])])
    if not (model / "config.json").exists():
        console.print(f"Making a starting model with random weights in {model}")
        make_model(model, seed)
    execute(config, prefect, Console(stderr=True))
    run = open_run(config.store, config.run)
    found = report(run)
    picture = folder / f"curve-{seed}.png"
    charts.png(found, picture)
    print_report(found)
    console.print(attempts_table(run))
    console.print(f"Curve: {picture}    Wall time: {time.monotonic() - started:.0f} s\n\nTry next:")
    for command in next_commands(run, config.store):
        console.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)


def make_model(folder: Path, seed: int) -> None:
    """Whole or not at all: an interrupted attempt leaves nothing under the folder's name."""
    from posttrain_core.learner.tiny import make_tiny_llama

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    make_tiny_llama(unfinished, seed)
    unfinished.rename(folder)


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
    return [
        f"posttrain show {example} --store {store}",
        f'posttrain sql "{query}" --store {store}',
        f"posttrain resume {run.name} --store {store} --set iterations={run.config.iterations * 2}",
    ]
