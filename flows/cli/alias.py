"""`posttrain alias`: names that move between published policies."""

from typing import Annotated

import typer

from flows.cli.options import DEFAULT_STORE, AsJson, InRun, Store
from flows.cli.output import print_json, print_table
from posttrain_core.errors import ConfigError
from posttrain_core.inspect import Run
from posttrain_core.registry import history
from posttrain_core.store import open_store


def alias(
    model: Annotated[str, typer.Argument(help="Name of the model in the registry.")],
    name: Annotated[str, typer.Argument(metavar="[ALIAS]", help="The alias to move.", show_default=False)] = "",
    version: Annotated[int, typer.Option("--version", "-v", help="Policy version that it shall point at.")] = -1,
    run: InRun = "",
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """Point an alias at a policy version of a run; without ALIAS, list every move of the model's aliases."""
    opened = open_store(store)
    if bool(name) != (version >= 0):
        raise ConfigError("alias: give both ALIAS and --version to move it, or neither to list the moves")
    if name:
        from posttrain_core.care.alias import point_alias

        point_alias(Run(opened, run), model, name, version)
    rows = [
        {"alias": move.alias, "run": move.target.run, "version": move.target.version, "since": move.since}
        for move in history(opened, model)
    ]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(list(rows[0]), (list(row.values()) for row in rows))
    else:
        typer.echo(f"no alias of {model!r} in {opened.url}")
