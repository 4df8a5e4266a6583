"""Runs one training run in a process of its own, and kills its process group at a store operation.

    python -m tests.crash.driver CONFIG_JSON [KEY_PATTERN before|after|pause [N]]

N counts the writes to keys that match: the N-th is the last thing that the process group does; `pause` stops the
process before it (SIGSTOP) instead. LEASE_SECONDS in the environment sets how long a record of the lease holds.
"""

import os
import re
import signal
import sys
from functools import partial
from itertools import count
from typing import Any

from flows import pipeline
from flows.scratch import scratch_folder
from posttrain_core.config import RunConfig
from posttrain_core.lease import Lease
from posttrain_core.store import ObjectStore, open_store
from tasks.runner import ThreadRunner


class KillingStore:
    """A store whose N-th write to a matching key is the last thing that this process group does."""

    def __init__(self, store: ObjectStore, pattern: str, when: str, number: int) -> None:
        self._store, self._pattern, self._when = store, re.compile(pattern), when
        self._numbers = count(1 - number)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not name.startswith("put"):
            return method

        def write(key: str, *arguments: Any) -> Any:
            hit = self._pattern.search(key) and next(self._numbers) == 0
            if hit and self._when == "before":
                os.killpg(0, signal.SIGKILL)
            if hit and self._when == "pause":
                os.kill(os.getpid(), signal.SIGSTOP)
            result = method(key, *arguments)
            if hit and self._when == "after":
                os.killpg(0, signal.SIGKILL)
            return result

        return write


def train(config: RunConfig) -> None:
    """A whole run in this process, in plain threads."""
    with (
        scratch_folder() as scratch,
        pipeline.open_services(config, scratch) as services,
        ThreadRunner(config.prefect) as runner,
    ):
        pipeline.train(services, runner)


def main(config_json: str, pattern: str = "", when: str = "after", number: str = "1") -> None:
    config = RunConfig.model_validate_json(config_json)
    if seconds := os.environ.get("LEASE_SECONDS"):
        pipeline.Lease = partial(Lease, ttl_seconds=float(seconds))  # type: ignore[assignment,misc]
    if pattern:
        pipeline.open_store = lambda url: KillingStore(open_store(url), pattern, when, int(number))  # type: ignore[assignment]
    train(config)


if __name__ == "__main__":
    main(*sys.argv[1:])
