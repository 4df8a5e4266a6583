"""How a stage is run: the protocol, and the runner that needs nothing but threads."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from posttrain_core.config import PrefectConfig
from posttrain_core.errors import PosttrainError
from posttrain_core.layout import Scope


@dataclass(frozen=True)
class Label:
    """Names one piece of work: "demo i12 generate 3"."""

    run: str
    scope: Scope
    stage: str
    shard: int | None = None

    def __str__(self) -> str:
        shard = "" if self.shard is None else f" {self.shard}"
        return f"{self.run} {self.scope} {self.stage}{shard}"


class Pending(Protocol):
    """A result to come."""

    def result(self) -> Any: ...


class Runner(Protocol):
    """Runs stages. Pending results among the arguments are waited for, in the order in which work was submitted."""

    def submit(self, label: Label, stage: Callable[..., Any], *arguments: Any) -> Pending: ...


class ThreadRunner:
    """Threads of this process; retries as `config` says. Use as a context manager."""

    def __init__(self, config: PrefectConfig) -> None:
        self._config = config
        self._random = Random()
        self._pool = ThreadPoolExecutor(config.max_workers, thread_name_prefix="stage")

    def __enter__(self) -> "ThreadRunner":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, label: Label, stage: Callable[..., Any], *arguments: Any) -> Pending:
        return self._pool.submit(self._run, stage, arguments)

    def _run(self, stage: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        # Work is taken up in the order of submission, so what this one waits for has already begun: no deadlock.
        values = [argument.result() if isinstance(argument, Future) else argument for argument in arguments]
        for attempt in range(self._config.retries + 1):
            try:
                return stage(*values)
            except PosttrainError as error:
                if not error.retryable or attempt == self._config.retries:
                    raise
                time.sleep(self._config.retry_delay_seconds * 2**attempt * self._random.uniform(0.5, 1.0))
        raise AssertionError
