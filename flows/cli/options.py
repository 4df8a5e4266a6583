"""Options that several commands share.

A command about a run takes its name as an argument (status, report, resume); one about something inside a run takes
`--run`. The store is always `--store`.
"""

from typing import Annotated

import typer

_NEWEST = "Name of the run. Default: the newest one in the store."

Store = Annotated[str, typer.Option("--store", envvar="POSTTRAIN_STORE", help="Folder or s3://bucket/prefix.")]
RunName = Annotated[str, typer.Argument(metavar="[RUN]", help=_NEWEST, show_default=False)]
InRun = Annotated[str, typer.Option("--run", "-r", help=_NEWEST, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

DEFAULT_STORE = "runs"
