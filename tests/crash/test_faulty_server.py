"""Whole runs on a real S3 server behind a proxy that delays, drops, cuts and refuses, and that crash on top of it.

Nothing is lost, nothing is done twice, and the final state is the undisturbed run's. A schedule is its seed:

    .venv/bin/python -m pytest "tests/crash/test_faulty_server.py::test_in_process[7]"

`make soak` runs all schedules; without it only the first ones do.
"""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlparse

import pytest

from flows import pipeline
from posttrain_core.config import RunConfig
from posttrain_core.errors import RunConflict, StoreError
from posttrain_core.lease import Lease
from posttrain_core.store import ObjectStore
from posttrain_core.store.s3 import S3Store, connect
from tests.conftest import BUCKET
from tests.crash.driver import train
from tests.crash.harness import kill, launch, nothing_computed_again, policy_digests, semantic_state
from tests.crash.proxy import Fault, FaultyProxy, Schedule
from tests.crash.test_kills import scripted

# Where the headers of an answer broke off, botocore reads half a date, or drops the connection.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:tzname GM? identified:dateutil.parser.UnknownTimezoneWarning"),
]
SOAK = bool(os.environ.get("POSTTRAIN_SOAK"))
IN_PROCESS, WHOLE = (180, 20) if SOAK else (16, 2)
RATE = 0.15
MAX_LIVES = 12
LEASE_SECONDS = 3.0


class CrashError(Exception):
    """The process would be dead from here on."""


class CrashingStore:
    """A store whose N-th write is the last: it raises before or after it, and then whatever is asked of it."""

    def __init__(self, store: ObjectStore, number: int, when: str) -> None:
        self._store, self._left, self._when, self._dead = store, number, when, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in ("url", "local_path"):
            return method

        def call(key: str, *arguments: Any) -> Any:
            if key.endswith("lease.json"):  # so that the next life need not wait
                return method(key, *arguments)
            self._left -= name.startswith(("put", "delete"))
            crash = self._left == 0 and not self._dead
            self._dead = self._dead or (crash and self._when == "before")
            if self._dead:
                raise CrashError(f"{name} {key}")
            result = method(key, *arguments)
            self._dead = self._dead or crash
            if crash:
                raise CrashError(f"{name} {key}")
            return result

        return call


def tiny(store: str | Path, **changes: Any) -> RunConfig:
    """Two iterations of two shards and two evaluations."""
    settings: dict[str, Any] = {
        "iterations": 2,
        "plan": {"problems_per_iteration": 4, "group_size": 4, "rollouts_per_shard": 8},
        "eval": {"every": 2, "num_problems": 2, "samples_per_problem": 2},
        "sandbox": {"type": "embedded", "workers": 1},
        "checkpoint": {"every": 1, "keep_last": 1},
        "prefect": {"retries": 2, "retry_delay_seconds": 0.05},
    }
    return scripted(store, **settings | changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("undisturbed")
    train(tiny(root))
    assert len(set(policy_digests(root))) == 1 + 2, "an iteration that learns nothing proves nothing"
    return semantic_state(root)


@pytest.fixture(scope="module")
def proxy(rados_environment: dict[str, str]) -> Iterator[FaultyProxy]:
    port = urlparse(rados_environment["AWS_ENDPOINT_URL_S3"]).port
    assert port
    with FaultyProxy(port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def harmed_client(proxy: FaultyProxy, rados_client: Any, rados_environment: dict[str, str]) -> Iterator[Any]:
    """Our client, to the proxy."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (rados_environment | {"AWS_ENDPOINT_URL_S3": proxy.url}).items():
            patch.setenv(name, value)
        client = connect(f"s3://{BUCKET}")
    yield client
    client.close()


@pytest.mark.parametrize("seed", range(IN_PROCESS))
def test_in_process(
    seed: int,
    proxy: FaultyProxy,
    harmed_client: Any,
    rados_client: Any,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three lives that end at a random write, then as many as it takes."""
    random, prefix = Random(seed), f"in-process-{seed}"
    config, direct = tiny(f"s3://{BUCKET}/{prefix}"), S3Store(rados_client, BUCKET, prefix)
    harmed = S3Store(harmed_client, BUCKET, prefix, sleep=lambda seconds: time.sleep(seconds / 10))
    monkeypatch.setattr(pipeline, "Lease", partial(Lease, ttl_seconds=LEASE_SECONDS))
    proxy.schedule = Schedule(seed, RATE)
    ends = []
    while len(ends) < MAX_LIVES:
        last = random.randint(1, 40) if len(ends) < 3 else -1
        dying = CrashingStore(harmed, last, random.choice(("before", "after")))
        monkeypatch.setattr(pipeline, "open_store", lambda url, store=dying: store)
        with nothing_computed_again(direct):
            try:
                train(config)
                break
            except (CrashError, StoreError, RunConflict) as error:
                ends.append(f"{type(error).__name__}: {error}")
    proxy.schedule = Schedule()
    story = "\n".join(["lives ended by:", *ends, "faults:", *proxy.journal])
    assert len(ends) < MAX_LIVES, story
    assert semantic_state(direct) == undisturbed, story


@pytest.mark.parametrize("seed", range(WHOLE))
def test_killed_processes(
    seed: int,
    proxy: FaultyProxy,
    rados_url: str,
    rados_client: Any,
    undisturbed: dict[str, str],
    tmp_path: Path,
) -> None:
    """A run in a process of its own: killed at two random writes and at a random time, then as often as it takes."""
    random, prefix = Random(seed), f"killed-{seed}"
    config, direct = tiny(f"s3://{BUCKET}/{prefix}"), S3Store(rados_client, BUCKET, prefix)
    environment = {"AWS_ENDPOINT_URL_S3": proxy.url, "LEASE_SECONDS": str(LEASE_SECONDS)}
    proxy.schedule = Schedule(seed, RATE)
    log = tmp_path / "log"
    for life in range(MAX_LIVES):
        point = (".", random.choice(("before", "after")), str(random.randint(2, 40))) if life < 2 else ()
        with nothing_computed_again(direct):
            process = launch(config, *point, log=log, environment=environment)
            if life == 2:
                kill(process, random.uniform(1.0, 6.0))
            if process.wait(300) == 0:
                break
    proxy.schedule = Schedule()
    story = log.read_text()[-3000:] + "\n".join(proxy.journal)
    assert process.returncode == 0, story
    assert semantic_state(direct) == undisturbed, story


def test_every_fault_was_met(proxy: FaultyProxy) -> None:
    """Of those that ran before this one in the same process."""
    if sum(proxy.done.values()) > 500:
        assert set(proxy.done) == set(Fault)
