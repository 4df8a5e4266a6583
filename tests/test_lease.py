"""One writer per run: locally by a lock that dies with its holder, elsewhere by a record that must keep changing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from posttrain_core import layout
from posttrain_core.errors import RunConflict, StoreError
from posttrain_core.lease import Lease
from posttrain_core.store import ObjectStore
from posttrain_core.store.local import LocalStore
from posttrain_core.store.memory import MemoryStore
from posttrain_core.store.s3 import S3Store
from tests.conftest import BUCKET

REPOSITORY = Path(__file__).parents[1]
KEY = layout.lease("r")
TTL = 2.0

HOLDER = """
import sys
from pathlib import Path
from posttrain_core.lease import Lease
from posttrain_core.store.local import LocalStore
with Lease(LocalStore(Path(sys.argv[1])), "r") as lease:
    lease.check()
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run until it is told to let go."""
    command = [sys.executable, "-c", HOLDER, str(root)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def wait_for(condition: Callable[[], bool], within: float = 20.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- on one machine ---


def test_a_second_process_is_refused_and_told_who_holds_the_run(tmp_path: Path) -> None:
    with holder(tmp_path) as process, pytest.raises(RunConflict) as caught, Lease(LocalStore(tmp_path), "r"):
        pass
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert f"process {process.pid} on " in text
    assert f"since {time.strftime('%Y-')}" in text
    assert "'r'" in text
    assert str(tmp_path) in text


def test_another_run_of_the_same_store_is_free(tmp_path: Path) -> None:
    with holder(tmp_path), Lease(LocalStore(tmp_path), "other") as lease:
        lease.check()


def test_a_killed_holder_leaves_the_run_free(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Lease(LocalStore(tmp_path), "r") as lease:
            lease.check()
            record = json.loads((tmp_path / KEY).read_bytes())
    assert record["pid"] == os.getpid()


def test_a_stopped_holder_still_holds_the_run(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(RunConflict, match=str(process.pid)), Lease(LocalStore(tmp_path), "r", TTL):
            pass


def test_a_released_run_is_free(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with Lease(store, "r") as first, pytest.raises(RunConflict, match=f"process {os.getpid()} "), Lease(store, "r"):
        pass
    with pytest.raises(RunConflict, match="not held"):
        first.check()
    with Lease(store, "r") as second:
        second.check()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lease_file_that_was_deleted_holds_nobody_out(replaced: bool, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with Lease(store, "r") as first:
        first.check()
        (tmp_path / KEY).unlink()
        if replaced:
            with Lease(store, "r") as second:
                second.check()
        with pytest.raises(RunConflict, match="deleted or replaced"):
            first.check()


def test_a_store_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_bytes(b"a file where a folder has to be")
    with pytest.raises(StoreError, match=r"lease\.json"), Lease(LocalStore(tmp_path), "r"):
        pass


# --- by record ---


class Flaky:
    """A store whose conditional writes can be made to fail, to hang, or to lose their answer."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.fault = ""
        self.writes = 0
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        self.writes += 1
        fault = self.fault
        if fault == "fails":
            raise StoreError("unreachable")
        if fault == "hangs":
            self.go_on.wait(60)
        new = self.store.put_if_match(key, data, etag)
        if fault == "loses its answer":
            raise StoreError("unreachable")
        return new


@pytest.fixture(params=["memory", "moto", "radosgw"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    client = request.getfixturevalue({"moto": "s3_client", "radosgw": "rados_client"}[request.param])
    return S3Store(client, BUCKET, tmp_path.name)


def test_a_living_holder_is_not_disturbed(remote: ObjectStore) -> None:
    with Lease(remote, "r", TTL) as first:
        for _ in range(2):
            with pytest.raises(RunConflict, match=f"held by process {os.getpid()} on "), Lease(remote, "r", TTL):
                pass
        first.check()
        record = json.loads(remote.get(KEY))
        wait_for(lambda: json.loads(remote.get(KEY))["beat"] > record["beat"])
        assert json.loads(remote.get(KEY))["since"] == record["since"], "since when it is held, not when it was renewed"
    with Lease(remote, "r", 60.0) as second:  # at once: it was given back
        second.check()


def test_a_record_that_stays_unchanged_is_taken_over_after_a_ttl(remote: ObjectStore) -> None:
    dead = Lease(remote, "r", TTL)
    remote.put(KEY, dead._record(0))
    begun = time.monotonic()
    with Lease(remote, "r", TTL) as heir:
        assert time.monotonic() - begun >= TTL
        heir.check()
        assert json.loads(remote.get(KEY))["nonce"] == heir._nonce


def test_a_holder_that_was_replaced_notices_and_leaves_the_record_alone(remote: ObjectStore) -> None:
    with Lease(remote, "r", TTL) as first:
        first.check()
        thief = Lease(remote, "r", TTL)._record(0)
        remote.put(KEY, thief)

        def noticed() -> bool:
            try:
                first.check()
            except RunConflict as error:
                return "taken over" in str(error)
            return False

        wait_for(noticed)
    assert remote.get(KEY) == thief


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_holder_that_cannot_renew_stops_believing_before_another_may_take_over(fault: str) -> None:
    store = Flaky(MemoryStore())
    lease = Lease(store, "r", TTL)  # type: ignore[arg-type]
    with lease:
        writes = store.writes
        wait_for(lambda: store.writes > writes)
        lease.check()
        store.fault = fault

        def disbelieves() -> bool:
            try:
                lease.check()
            except RunConflict as error:
                return "could not be renewed" in str(error)
            return False

        with Lease(store.store, "r", TTL) as heir:  # waits a TTL from its first look
            assert disbelieves(), "two processes would write"
            heir.check()
            store.go_on.set()
    assert store.store.get(KEY) == b"{}"


def test_a_short_outage_changes_nothing() -> None:
    store = Flaky(MemoryStore())
    with Lease(store, "r", 60.0) as lease:  # type: ignore[arg-type]
        lease._stop.set()  # the test renews by itself
        lease._thread.join()  # type: ignore[union-attr]
        for fault in ("fails", "loses its answer", "", ""):
            store.fault = fault
            renew_once(lease)
            lease.check()
        assert json.loads(store.get(KEY))["nonce"] == lease._nonce
        lease._etag, held = "stale", lease._etag
        renew_once(lease)
        lease.check()
        assert lease._etag == held


def renew_once(lease: Lease) -> None:
    """One round of the heartbeat."""
    rounds = iter([False, True])
    lease._stop = type("Once", (), {"wait": lambda self, seconds: next(rounds), "set": lambda self: None})()
    lease._beat()
