"""`posttrain run` and `posttrain resume`."""

import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from flows.cli.config_file import load_config
from flows.cli.progress import TerminalProgress
from flows.scratch import scratch_folder
from flows.server import LocalServer, PrefectServerUnavailable, configured_api_url, prefect_environment
from posttrain_core import layout
from posttrain_core.config import RunConfig
from posttrain_core.errors import ConfigError, RunConflict
from posttrain_core.stages.context import read_config
from posttrain_core.store import open_store

if TYPE_CHECKING:
    from flows.pipeline import Services

PREFECT_HOME = "POSTTRAIN_PREFECT_HOME"
INTERRUPTED = 130  # exit code
PROGRAM = "posttrain"

Overrides = Annotated[list[str] | None, typer.Option("--set", help="A setting, as plan.group_size=16. Repeatable.")]
WithPrefect = Annotated[bool, typer.Option(help="Run the stages as Prefect tasks, with a local server if need be.")]


def run(
    config_file: Annotated[Path, typer.Argument(help="YAML file; `posttrain init` writes one.", show_default=False)],
    overrides: Overrides = None,
    prefect: WithPrefect = True,
    deployment: Annotated[str, typer.Option(help="Start this deployment instead, as train/default.")] = "",
) -> None:
    """Start a run."""
    config = load_config(config_file, overrides or [])
    if open_store(config.store).stat(layout.run_record(config.run)) is not None:
        raise RunConflict(
            f"run {config.run!r} exists in {config.store}; go on with it by `{resume_command(config)}`, "
            "or choose another name by `--set run=NAME`"
        )
    if deployment:
        start_deployment(deployment, config)
    else:
        execute(config, prefect)


def resume(
    name: Annotated[str, typer.Argument(help="Name of the run.")],
    store: Annotated[str, typer.Option(envvar="POSTTRAIN_STORE", help="Folder or s3://bucket/prefix.")] = "runs",
    overrides: Overrides = None,
    prefect: WithPrefect = True,
) -> None:
    """Go on with a run from what its store holds. Operational settings may be changed with --set."""
    known = read_config(open_store(store), name).model_copy(update={"store": store})
    config = load_config(None, overrides or [], base=known)
    if (config.run, config.store) != (name, store):
        raise ConfigError(
            f"{name} in {store} is the record of run {config.run!r} in {config.store}: resume takes run and store as "
            "they are (no --set of them, no folder renamed by hand); `posttrain run` starts another run"
        )
    execute(config, prefect)


def execute(config: RunConfig, prefect: bool = True, console: Console | None = None) -> None:
    """Run to the end in this process, with bars; Ctrl-C says how to go on."""
    console = console or Console(stderr=True)
    home = Path(os.environ.get(PREFECT_HOME, "~/.cache/posttrain/prefect")).expanduser()
    with interruptible(config, console), closing(LocalServer(home)) as server, TerminalProgress(console) as progress:
        begun = prefect and _begin(server, console)  # it takes seconds to start, and so do the engines
        train(config, progress, partial(_api_url, server, console) if begun else lambda: None)
    where = f"--store {shlex.quote(config.store)}"
    done = f"Run {config.run} is done. What came of it: {program()} report {config.run} {where}"
    console.print(done, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def interruptible(config: RunConfig, console: Console) -> Iterator[None]:
    """The first Ctrl-C says how to go on and winds down once the stages that are running end; the second one goes at
    once, which the store does not mind either."""

    def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        said = (
            "Interrupted. What is running ends first; Ctrl-C again goes at once. Nothing finished is lost; go on with:"
        )
        console.print(f"\n{said}\n  {resume_command(config)}", style="bold", markup=False, soft_wrap=True)
        raise KeyboardInterrupt

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as under nohup
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def train(config: RunConfig, progress: TerminalProgress, api_url: Callable[[], str | None]) -> None:
    """The run itself. Prefect is imported only once its environment is set."""
    from flows import pipeline
    from tasks.runner import ThreadRunner

    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder())
        services = stack.enter_context(pipeline.open_services(config, scratch, progress))
        if api_url() is None or not _train_as_flow(services):
            pipeline.train(services, stack.enter_context(ThreadRunner(config.prefect)))


def _train_as_flow(services: "Services") -> bool:
    """False when the Prefect server was lost on the way: what is done is in the store, the rest needs no Prefect."""
    import httpx
    from prefect.exceptions import PrefectException

    from flows import train as flows
    from tasks.prefect_runner import drain

    try:
        with flows.holding(services):
            flows.train(services.run.config)
    except (httpx.HTTPError, PrefectException) as error:
        services.run.progress.note(f"Going on without Prefect, whose server was lost: {error}")
        return False
    finally:
        drain()
    return True


def _begin(server: LocalServer, console: Console) -> bool:
    try:
        server.begin()
    except PrefectServerUnavailable as error:
        _without(console, error)
        return False
    return True


def _api_url(server: LocalServer, console: Console) -> str | None:
    """The API to talk to, set in this process's environment; None, and a line that says why, where there is none."""
    try:
        url = server.wait_ready()
    except PrefectServerUnavailable as error:
        _without(console, error)
        return None
    os.environ.update(prefect_environment(server.home, url))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    console.print(f"[dim]Prefect UI: {url.removesuffix('/api')}[/dim]", highlight=False)
    return url


def _without(console: Console, error: PrefectServerUnavailable) -> None:
    console.print(f"Going on without Prefect, which the run does not need: {error}", style="yellow", markup=False)


def start_deployment(name: str, config: RunConfig) -> None:
    """Hand the run to a worker through the Prefect API that is configured. Folders are meant as they are here."""
    url = configured_api_url()
    if url is None:
        raise ConfigError(
            "--deployment needs a Prefect server: set PREFECT_API_URL to its API, as http://host:4200/api"
        )
    os.environ.update(prefect_environment(Path(), url))
    if config.store_is_local:
        config = config.model_copy(update={"store": open_store(config.store).url})
    if Path(config.model.path).is_dir():
        model = config.model.model_copy(update={"path": str(Path(config.model.path).absolute())})
        config = config.model_copy(update={"model": model})
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    try:
        flow_run = run_deployment(name, parameters={"config": config.model_dump(mode="json")}, timeout=0)
    except ObjectNotFound as error:
        raise ConfigError(f"no deployment {name!r} at {url}: `prefect deploy --all` makes train/default") from error
    Console().print(f"flow run {getattr(flow_run, 'name', '?')} of {name} is scheduled; a worker takes it up")


def resume_command(config: RunConfig) -> str:
    return f"{program()} resume {config.run} --store {shlex.quote(config.store)}"


def program() -> str:
    """What to type for this program: its name where the shell finds it, else its path."""
    invoked = Path(sys.argv[0])
    found = shutil.which(PROGRAM)
    if invoked.name != PROGRAM or (found is not None and Path(found).samefile(invoked)):
        return PROGRAM
    return os.path.relpath(invoked) if invoked.absolute().is_relative_to(Path.cwd()) else str(invoked.absolute())
