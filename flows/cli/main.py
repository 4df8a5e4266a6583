"""`posttrain`: the commands by name, and what becomes of errors.

Exit codes: 0, 1 (unexpected), 2 (wrong settings or arguments), 130 (interrupted), and those in `posttrain_core.errors`.
"""

import sys
import warnings

import typer

from flows.cli import export, model
from flows.cli.alias import alias
from flows.cli.bench import bench
from flows.cli.care import delete, fork, fsck, gc
from flows.cli.demo import demo
from flows.cli.doctor import doctor
from flows.cli.looking import diff, report, rollouts, show, sql, status
from flows.cli.run import resume, run
from flows.cli.template import init
from flows.cli.view import view
from posttrain_core.errors import PosttrainError
from posttrain_core.inspect.text import visible

app = typer.Typer(
    help="Reinforcement-learning post-training as a staged, checkpointed, retryable batch pipeline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    demo,
    init,
    run,
    resume,
    status,
    report,
    show,
    rollouts,
    sql,
    diff,
    view,
    doctor,
    bench,
    fsck,
    gc,
    fork,
    delete,
    alias,
):
    app.command()(command)
app.add_typer(export.app, name="export")
app.add_typer(model.app, name="model")


def main() -> None:
    """Errors that have a name are one message and an exit code; the others keep their traceback."""
    warnings.formatwarning = lambda message, *_, **__: f"posttrain: {message}\n"
    try:
        app()
    except PosttrainError as error:
        typer.echo(f"posttrain: {visible(str(error), keep=chr(10))}", err=True)  # it may quote what a model wrote
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
