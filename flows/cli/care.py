"""Commands that care for a store: fsck, gc, delete, fork."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flows.cli.config_file import load_config
from flows.cli.options import DEFAULT_STORE, AsJson, RunName, Store
from flows.cli.output import print_json, print_table
from flows.cli.progress import TerminalProgress
from posttrain_core.errors import ConfigError, StoreError
from posttrain_core.inspect import open_run
from posttrain_core.inspect.text import visible
from posttrain_core.store import open_store

if TYPE_CHECKING:
    from posttrain_core.care.fsck import Checked

_MAX_LISTED = 50  # findings of a run that are printed; --json prints all


def fsck(
    run: RunName = "",
    store: Store = DEFAULT_STORE,
    everything: Annotated[bool, typer.Option("--all", help="Check every run of the store.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check that a run is whole: every digest, schema, row count and lineage edge. Exit code 5 when it is not."""
    from posttrain_core.care.fsck import check_run
    from posttrain_core.care.inventory import shelves

    if run and everything:
        raise ConfigError("give the name of a run or --all, not both")
    opened = open_store(store)
    if everything:
        names = sorted(name for name, found in shelves(opened).items() if not found.deleted)
    else:
        names = [run or open_run(store).name]
    results = []
    for name in names:
        with bar(f"checking {name}") as progress:
            results.append(check_run(opened, name, progress))
        if not as_json:
            _print_checked(results[-1])
    if as_json:
        print_json([found.as_json() for found in results])
    if any(found.findings for found in results):
        raise typer.Exit(StoreError.exit_code)


def _print_checked(found: "Checked") -> None:
    size = f"{found.num_manifests} manifests, {found.num_objects} objects, {found.num_rows} rows"
    size += f", {found.num_bytes} bytes"
    verdict = f"{len(found.findings)} findings" if found.findings else "clean"
    typer.echo(f"run {found.run}: {verdict} ({size})")
    for finding in found.findings[:_MAX_LISTED]:
        typer.echo(f"  {visible(str(finding))}")
    if len(found.findings) > _MAX_LISTED:
        typer.echo(f"  ... and {len(found.findings) - _MAX_LISTED} more; --json prints all")
    if found.num_leftovers:
        typer.echo(f"  uncommitted: {found.num_leftovers} objects, {found.leftover_bytes} bytes (see posttrain gc)")


def gc(
    store: Store = DEFAULT_STORE,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it. Default: only say what would go.")] = False,
    grace_hours: Annotated[float, typer.Option("--grace", min=0, help="Leave alone what is younger, hours.")] = 24.0,
    verbose: Annotated[bool, typer.Option("--keys", help="Also print every key.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find, and with --delete remove, what no committed manifest of any run names and no resume can use."""
    from posttrain_core.care.gc import find_garbage, remove_garbage

    opened, grace, left = open_store(store), grace_hours * 3600, {}
    if delete:
        with bar("deleting") as progress:
            done = remove_garbage(opened, grace, progress)
        found, left = done.garbage, done.left
    else:
        found = find_garbage(opened, grace)
    total = sum(item.num_bytes for item in found)
    if as_json:
        listed = [{"key": i.key, "num_bytes": i.num_bytes, "run": i.run, "kind": str(i.kind)} for i in found]
        print_json({"deleted": delete, "num_bytes": total, "objects": listed, "held_runs": sorted(left)})
        return
    kinds = sorted({(item.run, item.kind) for item in found})
    if kinds:
        parts = {kind: [item for item in found if (item.run, item.kind) == kind] for kind in kinds}
        rows = [(run, kind, len(parts[run, kind]), sum(i.num_bytes for i in parts[run, kind])) for run, kind in kinds]
        print_table(("run", "what", "objects", "bytes"), rows)
    for item in found if verbose else ():
        typer.echo(f"  {visible(item.key)}")
    for name, items in left.items():
        typer.echo(f"run {name} is held by another process: {len(items)} objects are left until it is at rest")
    if delete:
        typer.echo(f"deleted {len(found)} objects, {total} bytes")
    else:
        typer.echo(f"{len(found)} objects, {total} bytes could go" + ("; --delete removes them" if found else ""))


def delete(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    store: Store = DEFAULT_STORE,
) -> None:
    """Delete a run. Its objects go with `posttrain gc --delete`, but for those that forks of it need."""
    from posttrain_core.care.delete import delete_run

    delete_run(open_store(store), run)
    typer.echo(f"run {run} is deleted; `posttrain gc --delete` frees what it took, once that is older than the grace")


def fork(
    run: Annotated[str, typer.Argument(help="Name of the run to fork.")],
    at: Annotated[int, typer.Option(help="The first iteration of its own: it goes on from this policy version.")],
    name: Annotated[str, typer.Option("--as", help="Name of the new run.")],
    store: Store = DEFAULT_STORE,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="A setting from there on. Repeatable.")] = None,
) -> None:
    """Make a new run that shares another one's iterations before --at, and its policy, by reference."""
    from posttrain_core.care import fork as forking

    parent = open_run(store, run)
    base = parent.config.model_copy(update={"run": name, "store": store})
    config = load_config(None, overrides or [], base=base)
    if (config.run, config.store) != (name, store):
        raise ConfigError("a fork lies in its parent's store, and its name is given by --as: leave run and store out")
    made = forking.fork(open_store(store), run, at, config)
    typer.echo(
        f"run {name} goes on from version {at} of {run}: it shares {made.num_manifests} manifests and "
        f"{made.num_objects} objects ({made.num_bytes} bytes), and copies none"
    )
    if made.changed:
        typer.echo(f"  other settings from iteration {at} on: {', '.join(made.changed)}")
    where = "version 0 with a new optimizer" if made.checkpoint is None else f"the checkpoint of {made.checkpoint}"
    replays = at - (0 if made.checkpoint is None else made.checkpoint + 1)
    typer.echo(f"  the learner begins with {where}" + (f" and replays {replays} updates" if replays else ""))
    typer.echo(f"  go on with: posttrain resume {name} --store {shlex.quote(store)}")


@contextmanager
def bar(label: str) -> Iterator[Callable[[int, int], None]]:
    with TerminalProgress(Console(stderr=True)) as progress:
        yield lambda done, total: progress.advance(label, done, total)
