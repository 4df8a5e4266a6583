"""`posttrain view`: a local web page over a store."""

import sys
from typing import Annotated

import typer

from flows.cli.options import DEFAULT_STORE
from posttrain_core.errors import ConfigError
from posttrain_core.store import open_store


def view(
    root: Annotated[
        str, typer.Argument(metavar="[ROOT]", envvar="POSTTRAIN_STORE", help="Folder or s3://bucket/prefix.")
    ] = DEFAULT_STORE,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback demands a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 is any free one.")] = 8700,
) -> None:
    """Serve a web page: runs, their charts, their rollouts. Reads only; works offline; Ctrl-C stops it."""
    try:
        from posttrain_core.view.server import serve
    except ImportError as error:
        raise ConfigError(
            f"the viewer needs {error.name}: {sys.executable} -m pip install 'posttrain[view]'"
        ) from error
    serve(open_store(root), host, port, lambda address: typer.echo(f"{address}   (Ctrl-C stops)"))
