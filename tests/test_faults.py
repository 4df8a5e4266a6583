"""Whole runs that meet a fault: each ends with an error that names it, and goes on as if nothing had been."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import pipeline
from posttrain_core.config import RunConfig
from posttrain_core.errors import ObjectCorrupt, RunConflict
from posttrain_core.store import ObjectStore, open_store
from tests.crash.driver import train
from tests.crash.harness import REPOSITORY, kill, launch, policy_digests, semantic_state
from tests.crash.test_kills import scripted


class StoppedError(Exception):
    """The run came to where the test stops it."""


class StoppingStore:
    """A store whose first write to a matching key does not happen; nothing is written after it either."""

    def __init__(self, store: ObjectStore, pattern: str) -> None:
        self._store, self._pattern, self._stopped = store, re.compile(pattern), False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not name.startswith("put"):
            return method

        def write(key: str, *arguments: Any) -> Any:
            self._stopped = self._stopped or bool(self._pattern.search(key))
            if self._stopped and not key.endswith("lease.json"):
                raise StoppedError(key)
            return method(key, *arguments)

        return write


def small(store: str | Path, **changes: Any) -> RunConfig:
    """Two iterations with two shards each."""
    settings: dict[str, Any] = {"iterations": 2, "checkpoint": {"every": 1}}
    return scripted(store, **settings | changes)


def train_until(config: RunConfig, pattern: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "open_store", lambda url: StoppingStore(open_store(url), pattern))
        with pytest.raises(StoppedError):
            train(config)


def contents(root: Path) -> dict[str, bytes]:
    """Every object but those that any start of the run may write."""
    paths = [path for path in root.glob("runs/**/*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths if path.name != "lease.json"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("undisturbed")
    train(small(root))
    assert len(set(policy_digests(root))) == 1 + 2, "an iteration that learns nothing proves nothing"
    return semantic_state(root)


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


SECOND = "iteration=00001"
DAMAGE = {  # what is damaged: (where the run is stopped, the object that it then has to read)
    "plan": (f"rollouts/{SECOND}", f"r/plan/{SECOND}/shard=0001.parquet"),
    "rollouts": (f"executions/{SECOND}", f"r/rollouts/{SECOND}/*"),
    "executions": (f"verdicts/.*/{SECOND}", f"r/executions/{SECOND}/*"),
    "verdicts": (f"manifests/{SECOND}/verify", f"r/verdicts/*/{SECOND}/shard=0001.parquet"),
    "verdicts of a manifest": (f"samples/{SECOND}", f"r/verdicts/*/{SECOND}/shard=0001.parquet"),
    "samples": (f"manifests/{SECOND}/update", f"r/samples/{SECOND}/shard=0000.parquet"),
    "checkpoint": (f"samples/{SECOND}", "r/checkpoints/iteration=00000/*/*"),
    "policy": (f"rollouts/{SECOND}", "r/policies/version=00001/*/*"),
    "manifest": (f"rollouts/{SECOND}", "r/manifests/iteration=00000/publish.json"),
    "plan manifest": (f"executions/{SECOND}", f"r/manifests/{SECOND}/plan.json"),
}


@pytest.mark.parametrize("damage", [truncated, flipped])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_object_stops_the_run_and_is_left_as_it_is(
    kind: str, damage: Callable[[bytes], bytes], tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    config = small(tmp_path)
    stop, pattern = DAMAGE[kind]
    train_until(config, stop)
    path = min(tmp_path.glob(f"runs/{pattern}"))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    before = contents(tmp_path)
    with pytest.raises(ObjectCorrupt, match=re.escape(path.relative_to(tmp_path).as_posix())) as caught:
        train(config)
    assert caught.value.exit_code == 5
    assert "Nothing was overwritten" in str(caught.value)
    after = contents(tmp_path)
    assert {key: after.get(key) for key in before} == before
    path.write_bytes(whole)
    train(config)
    assert semantic_state(tmp_path) == undisturbed


def test_a_damaged_run_record_stops_the_run(tmp_path: Path) -> None:
    train_until(small(tmp_path), "manifests/start")
    path = tmp_path / "runs/r/run.json"
    path.write_bytes(truncated(path.read_bytes()))
    with pytest.raises(ObjectCorrupt, match=r"runs/r/run\.json"):
        train(small(tmp_path))


# --- settings ---


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "config.seed: was 51, is 1"),
        ({"plan": {"problems_per_iteration": 6, "group_size": 3, "rollouts_per_shard": 12}}, "config.plan.group_size"),
        ({"learner": {"type": "numpy", "learning_rate": 0.25}}, "config.learner.learning_rate: was 0.5, is 0.25"),
        ({"sampler": {"type": "scripted", "responses": ["x+1"]}}, "config.sampler.responses"),
        ({"domains": {"program": {"type": "program", "weight": 2.0}}}, "config.domains.program.weight"),
        ({"algorithm": {"preset": "rloo"}}, "config.algorithm.preset: was 'grpo', is 'rloo'"),
        ({"eval": {"every": 2, "num_problems": 5, "samples_per_problem": 2}}, "config.eval.num_problems"),
    ],
)
def test_a_semantic_setting_cannot_change(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    train_until(small(tmp_path), "manifests/start")
    before = contents(tmp_path)
    with pytest.raises(RunConflict, match=re.escape(field)) as caught:
        train(small(tmp_path, **changes))
    assert caught.value.exit_code == 3
    assert contents(tmp_path) == before


def test_operational_settings_may_change(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    train_until(small(tmp_path), f"rollouts/{SECOND}")
    changed = small(
        tmp_path,
        prefect={"max_workers": 1, "retries": 0},
        sandbox={"type": "embedded", "workers": 1},
        checkpoint={"every": 2, "keep_last": 2},
    )
    train(changed)
    assert {k: v for k, v in semantic_state(tmp_path).items() if "/policies/" not in k} == {
        k: v for k, v in undisturbed.items() if "/policies/" not in k
    }


def test_evaluating_more_often_leaves_alone_what_was_retired(tmp_path: Path) -> None:
    config = small(tmp_path, iterations=3, eval={"every": 3, "num_problems": 6, "samples_per_problem": 2})
    train(config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep_last": 1})}))
    assert len(list(tmp_path.glob("runs/r/policies/*/*/*"))) == 2
    train(small(tmp_path, iterations=4, eval={"every": 1, "num_problems": 6, "samples_per_problem": 2}))
    evaluated = {path.parent.name for path in tmp_path.glob("runs/r/eval/manifests/*/verify.json")}
    assert evaluated == {f"iteration={version:05d}" for version in (0, 3, 4)}
    train(small(tmp_path, iterations=2, eval={"every": 1, "num_problems": 6, "samples_per_problem": 2}))


# --- a full disk ---

FULL = """
import json, sys
from pathlib import Path
from posttrain_core.config import RunConfig
from posttrain_core.errors import StoreFull
from tests.crash.harness import semantic_state
from tests.test_faults import train

disk, config = Path(sys.argv[1]), RunConfig.model_validate_json(sys.argv[2])
ballast = [disk / f"ballast{n}" for n in range(16)]
for path in ballast:
    path.write_bytes(b"b" * 65536)
try:
    with (disk / "rest").open("wb", buffering=0) as file:
        while True:
            file.write(b"b" * 4096)
except OSError:
    pass
num_full = 0
while True:
    try:
        train(config)
        break
    except StoreFull as error:
        assert error.exit_code == 5 and "free some space" in str(error), error
        num_full += 1
        ballast.pop().unlink()
print(json.dumps([num_full, semantic_state(Path(config.store))]))
"""


def test_a_disk_that_fills_up_stops_the_run_and_it_goes_on_when_there_is_space(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """A real file system, small, that only this test's process sees; freed bit by bit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=1500k tmpfs "{disk}" && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh", sys.executable, "-c", FULL, str(disk)]
    config = small(disk / "store").model_dump_json()
    done = subprocess.run([*command, config], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    num_full, state = json.loads(done.stdout)
    assert num_full >= 4
    assert state == undisturbed


# --- who may write, and what does not matter ---


def test_a_second_process_on_a_run_is_refused(tmp_path: Path) -> None:
    config, log = small(tmp_path, iterations=500), tmp_path / "log"
    process = launch(config, log=log)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "runs/r/run.json").exists():
            assert time.monotonic() < deadline, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        with pytest.raises(RunConflict, match=f"held by process {process.pid} on "):
            train(config)
    finally:
        kill(process, 0.0)


def test_telemetry_may_vanish(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    train_until(small(tmp_path), f"verdicts/.*/{SECOND}")
    shutil.rmtree(tmp_path / "runs/r/telemetry")
    shutil.rmtree(tmp_path / "runs/r/eval/telemetry")
    train(small(tmp_path))
    assert semantic_state(tmp_path) == undisturbed


def test_a_run_that_was_stopped_before_its_last_retention_makes_it_good(tmp_path: Path) -> None:
    config = small(tmp_path, checkpoint={"every": 1, "keep_last": 1})
    train_until(config, "retired/policies/00001")
    kept = {path.name for path in tmp_path.glob("runs/r/policies/*")}
    assert kept == {f"version={version:05d}" for version in (0, 1, 2)}
    train(config)
    assert not list(tmp_path.glob("runs/r/policies/version=00001/*/*"))


def test_a_run_on_s3_is_the_run_on_a_folder(s3_url: str, undisturbed: dict[str, str]) -> None:
    train_until(small(s3_url), f"manifests/{SECOND}/update")
    train(small(s3_url))
    assert semantic_state(open_store(s3_url)) == undisturbed
