"""The stages as Prefect tasks: retries, timeout and run names. Results are references and are never cached;
the store is the one resume path."""

from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.events.worker import EventsWorker
from prefect.futures import PrefectFuture
from prefect.logging.handlers import APILogWorker

from posttrain_core.config import PrefectConfig
from posttrain_core.errors import PosttrainError
from tasks.runner import Label, Pending

STAGES = ("start", "plan", "generate", "execute", "verify", "update", "publish")


class Work:
    """A call that Prefect does not look into; pending results among its arguments are resolved when it runs."""

    def __init__(self, stage: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._stage, self._arguments = stage, arguments

    @property
    def awaited(self) -> list[PrefectFuture[Any]]:
        return [argument for argument in self._arguments if isinstance(argument, PrefectFuture)]

    def __call__(self) -> Any:
        return self._stage(*(a.result() if isinstance(a, PrefectFuture) else a for a in self._arguments))


class PrefectRunner:
    """Submits to the task runner of the flow run it is used in."""

    def __init__(self, config: PrefectConfig) -> None:
        delays = [config.retry_delay_seconds * 2**attempt for attempt in range(config.retries)]
        self._tasks = {name: _stage_task(name, config, delays) for name in STAGES}

    def submit(self, label: Label, stage: Callable[..., Any], *arguments: Any) -> Pending:
        work = Work(stage, arguments)
        return self._tasks[label.stage].submit(str(label), work, return_state=False, wait_for=work.awaited)


def _stage_task(name: str, config: PrefectConfig, delays: list[float]) -> Task[[str, Work], Any]:
    @task(
        name=name,
        task_run_name="{label}",
        retries=config.retries,
        retry_delay_seconds=delays or None,
        retry_jitter_factor=0.5 if delays else None,
        retry_condition_fn=_retryable,
        timeout_seconds=config.timeout_seconds,
        persist_result=False,
        cache_policy=NO_CACHE,
    )
    def run_stage(label: str, work: Work) -> Any:
        return work()

    return run_stage


def _retryable(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, PosttrainError) and error.retryable


def drain(timeout_seconds: float = 10.0) -> None:
    """Send what is still on its way to the Prefect server; call it before the server stops.

    Prefect does so at interpreter exit, where it would wait minutes for a server that is gone.
    """
    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=timeout_seconds)
