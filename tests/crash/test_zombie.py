"""A writer that is stopped in the middle of a write, loses its lease to another one, and wakes up: nothing changes.

The store is a folder, where only someone who deletes the lease file can take the lease away, and a real S3 server.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from posttrain_core import layout
from posttrain_core.store import ObjectStore, open_store
from tests.crash.harness import launch, run_to_end, semantic_state, wait_killed
from tests.crash.test_faulty_server import tiny, train

ENVIRONMENT = {"LEASE_SECONDS": "3"}
PUBLISH = "manifests/iteration=00001/publish"
STOPS = [  # where the zombie is stopped: before the N-th write of ...
    ("local", "manifests/iteration=00001/update", "1"),
    ("radosgw", "rollouts/iteration=00001", "1"),
    ("radosgw", "manifests/iteration=00001/update", "1"),  # it has just checked its lease
    ("radosgw", "lease.json", "3"),
]


def contents(store: ObjectStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list("runs/")}


@pytest.mark.parametrize(("kind", "pattern", "number"), STOPS)
def test_a_zombie_changes_nothing(
    kind: str, pattern: str, number: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its heir is killed just before the last commit: that one would be the zombie's to make, if it were let."""
    url = str(tmp_path / "store") if kind == "local" else request.getfixturevalue("rados_url")
    config, store, log, heirs_log = tiny(url), open_store(url), tmp_path / "log", tmp_path / "heir"
    zombie = launch(config, pattern, "pause", number, log=log, environment=ENVIRONMENT)
    try:
        wait_stopped(zombie.pid, log)
        if kind == "local":
            (Path(url) / layout.lease("r")).unlink()
        wait_killed(launch(config, PUBLISH, "before", log=heirs_log, environment=ENVIRONMENT), heirs_log)
        before = contents(store)
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.wait(120) != 0
    finally:
        if zombie.poll() is None:
            os.killpg(zombie.pid, signal.SIGKILL)
            zombie.wait()
    assert "RunConflict" in log.read_text(), log.read_text()[-3000:]
    after = contents(store)
    assert {key: after.get(key) for key in before} == before, log.read_text()[-3000:]
    added = [key for key in after.keys() - before.keys() if "/telemetry/" not in key and "/attempt=" not in key]
    assert added == [], "only what nobody reads"
    run_to_end(config, heirs_log, environment=ENVIRONMENT)
    train(tiny(tmp_path / "undisturbed"))
    assert semantic_state(store) == semantic_state(tmp_path / "undisturbed")


def wait_stopped(pid: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0] != "T":
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)
