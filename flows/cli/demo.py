"""`posttrain demo`: a starting model made here, a warm start, forty iterations, and what came of them."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.cli.config_file import load_config
from flows.cli.run import Overrides, WithPrefect, execute

_EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.yaml"


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
    from flows.cli.demo_results import print_results

    print_results(console, config.store, config.run, folder / f"curve-{seed}.png")
    console.print(f"Wall time: {time.monotonic() - started:.0f} s", highlight=False)


def make_model(folder: Path, seed: int) -> None:
    """Whole or not at all: an interrupted attempt leaves nothing under the folder's name."""
    from posttrain_core.learner.tiny import make_tiny_llama

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    make_tiny_llama(unfinished, seed)
    unfinished.rename(folder)
