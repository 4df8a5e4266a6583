"""The Prefect flows. `train` repeats iterations until the stop rule holds; `iterate` is one iteration.

Both take the run's configuration as their parameter, so that the UI renders it as a form, and both work from the CLI,
from a deployment and called directly: services that are already open in this process are used, else they are opened.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from prefect import flow
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows import pipeline
from flows.pipeline import Services, open_services
from flows.scratch import scratch_folder
from posttrain_core.config import RunConfig
from tasks.artifacts import curve_artifact, iteration_artifact, view_artifact
from tasks.prefect_runner import PrefectRunner

_OPEN: ContextVar[Services | None] = ContextVar("open_services", default=None)


def _threads(max_workers: int) -> TaskRunner[PrefectFuture[Any]]:
    return ThreadPoolTaskRunner(max_workers=max_workers)  # type: ignore[return-value]


def _run_name() -> str:
    parameters = flow_run.parameters
    config = parameters["config"]
    name = config["run"] if isinstance(config, dict) else config.run
    if "iteration" not in parameters:
        return str(name)
    first, count = parameters["iteration"], parameters.get("count", 1)
    return f"{name} iteration {first}" if count == 1 else f"{name} iterations {first} to {first + count - 1}"


@flow(flow_run_name=_run_name, persist_result=False, task_runner=_threads(4))
def train(config: RunConfig) -> int:
    """Start or resume a run and go on until its stop rule holds. Returns the last policy version."""
    with services_for(config) as services:
        view_artifact(services.run)
        version = pipeline.train(services, PrefectRunner(config.prefect), block=_as_subflow)
        curve_artifact(services.run)
        get_run_logger().info("run %s is at policy version %d", config.run, version)
        return version


@flow(flow_run_name=_run_name, persist_result=False, task_runner=_threads(4))
def iterate(config: RunConfig, iteration: int, count: int = 1) -> int:
    """Iterations of a run that has reached the first of them: plan, generate, execute, verify, update, publish."""
    with services_for(config) as services:
        runner = PrefectRunner(config.prefect)
        if iteration == 0:
            pipeline.begin(services, runner)
        for number in range(iteration, iteration + count):
            pipeline.iterate_block(services, number, number + 1, runner)
            iteration_artifact(services.run, number)
        return iteration + count


@contextmanager
def services_for(config: RunConfig) -> Iterator[Services]:
    """The services that this process holds open for the run, else new ones for the length of the block."""
    services = _OPEN.get()
    if services is not None and services.run.config == config:
        yield services
        return
    with scratch_folder() as scratch, open_services(config, scratch) as services:
        with holding(services):
            yield services


@contextmanager
def holding(services: Services) -> Iterator[None]:
    """Let flows that are called inside the block use these services."""
    token = _OPEN.set(services)
    try:
        yield
    finally:
        _OPEN.reset(token)


def _as_subflow(services: Services, first: int, last: int) -> None:
    config = services.run.config
    # The parent flow run has a heartbeat. A second one would be waited for at the end of each block: a second.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        iterate.with_options(task_runner=_threads(config.prefect.max_workers))(config, first, last - first)
