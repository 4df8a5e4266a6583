"""`posttrain export`: rollouts as a dataset or as chat examples, a policy as a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.care import bar
from flows.cli.options import DEFAULT_STORE, RunName, Store
from posttrain_core.inspect import open_run

app = typer.Typer(help="Write a run's rollouts or a policy to local files.", no_args_is_help=True)

ToFolder = Annotated[Path, typer.Option("--to", help="Folder to make; it must not exist.", show_default=False)]
ToFile = Annotated[Path, typer.Option("--to", help="File to make; it must not exist.", show_default=False)]


@app.command()
def dataset(to: ToFolder, run: RunName = "", store: Store = DEFAULT_STORE) -> None:
    """Write every rollout with its verdict as a Hugging Face style dataset: Parquet files and a card."""
    from posttrain_core.care.export import export_dataset

    with bar("exporting") as progress:
        counts = export_dataset(open_run(store, run), to, progress)
    parts = (f"{sum(found.rows.values())} rollouts in {split}" for split, found in counts.items())
    typer.echo(f"{to}: {', '.join(parts)}")


@app.command()
def sft(
    to: ToFile,
    run: RunName = "",
    store: Store = DEFAULT_STORE,
    min_reward: Annotated[float, typer.Option(help="Only rewards from here on.")] = 1.0,
    best_of_group: Annotated[bool, typer.Option("--best-of-group", help="Only the best of each group.")] = False,
    domain: Annotated[str, typer.Option(help="Only this domain.")] = "",
) -> None:
    """Write good training rollouts as chat examples for supervised training: JSONL with `messages`."""
    from posttrain_core.care.export import export_sft

    with bar("exporting") as progress:
        num = export_sft(open_run(store, run), to, min_reward, best_of_group, domain, progress)
    typer.echo(f"{to}: {num} examples")


@app.command()
def policy(
    to: ToFolder,
    run: RunName = "",
    store: Store = DEFAULT_STORE,
    version: Annotated[
        int | None, typer.Option(help="Policy version. Default: the newest.", show_default=False)
    ] = None,
) -> None:
    """Write a policy version as a Hugging Face model folder, every file checked, with a model card."""
    from posttrain_core.care.export_policy import export_policy

    with bar("copying") as progress:
        done = export_policy(open_run(store, run), to, version, progress)
    typer.echo(f"{to}: policy version {done.version}, {done.num_files} files, {done.num_bytes} bytes")
