"""Start a run in its own process group, kill it, look at what it left behind."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from posttrain_core.config import RunConfig
from posttrain_core.errors import ObjectNotFound
from posttrain_core.manifest import parse_manifest
from posttrain_core.store import ObjectStore, open_store

STAGE_OF_TABLE = {"rollouts": "generate", "executions": "execute", "verdicts": "verify"}
REPOSITORY = Path(__file__).parents[2]
Work = tuple[str, str, int]  # (purpose and iteration, stage, shard)
Root = Path | ObjectStore  # where to look: a local store's folder or any store


def launch(
    config: RunConfig, *kill_at: str, log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.crash.driver", config.model_dump_json(), *kill_at],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )


def wait_killed(process: subprocess.Popen[bytes], log: Path, timeout: float = 300.0) -> None:
    """Until the process killed itself; its descendants must follow within seconds."""
    family: set[tuple[int, str]] = set()
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        family |= descendants(process.pid)
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.01)
    assert process.returncode == -signal.SIGKILL, log.read_text()[-3000:]
    assert_gone(family)


def kill(process: subprocess.Popen[bytes], after: float) -> None:
    """SIGKILL to the group after so many seconds, unless it ended well before."""
    family: set[tuple[int, str]] = set()
    deadline = time.monotonic() + after
    while time.monotonic() < deadline and process.poll() is None:
        family |= descendants(process.pid)
        time.sleep(0.01)
    if process.poll() is not None:
        assert process.returncode == 0
        return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert_gone(family)


def run_to_end(
    config: RunConfig, log: Path, timeout: float = 300.0, environment: Mapping[str, str] | None = None
) -> None:
    process = launch(config, log=log, environment=environment)
    assert process.wait(timeout) == 0, log.read_text()[-3000:]


def finish(config: RunConfig, root: Path, points: Sequence[tuple[str, ...]], seconds: Sequence[float] = ()) -> None:
    """Killed at each point in turn, then after each time, resumed each time, then run to the end. What was committed
    is never computed again."""
    log = root / "log"
    for point in points:
        with nothing_computed_again(root):
            wait_killed(launch(config, *point, log=log), log)
    for after in seconds:
        with nothing_computed_again(root):
            kill(launch(config, log=log), after)
    with nothing_computed_again(root):
        run_to_end(config, log)


@contextmanager
def nothing_computed_again(root: Root) -> Iterator[None]:
    before, done = committed(root), Counter(computed(root))
    yield
    again = Counter(computed(root)) - done
    assert not before & set(again), "committed work was computed again"


def descendants(root: int) -> set[tuple[int, str]]:
    """(pid, start time) of every live process below `root`."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append((int(entry.name), fields[19]))
    found: set[tuple[int, str]] = set()
    todo = [root]
    while todo:
        for child in parents.get(todo.pop(), []):
            found.add(child)
            todo.append(child[0])
    return found


def assert_gone(family: set[tuple[int, str]], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while alive := [pid for pid, start in family if (fields := _stat(pid)) and fields[19] == start]:
        names = {pid: process_command(pid) for pid in alive}
        assert time.monotonic() < deadline, f"survivors of a killed run: {names}"
        time.sleep(0.02)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def process_command(pid: int) -> str:
    """The command line, "?" for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"


def semantic_state(root: Root) -> dict[str, str]:
    """Every semantic table by its bytes, every manifest by its digest, every kept policy file by its bytes."""
    state, store = {}, _store(root)
    for key in _keys(store):
        if key.endswith(".parquet"):
            state[key] = hashlib.sha256(store.get(key)).hexdigest()
        elif "/manifests/" in key:
            manifest = parse_manifest(store.get(key), key)
            state[key] = manifest.digest
            for ref in manifest.named("/policies/"):
                with suppress(ObjectNotFound):
                    name = re.sub("attempt=[0-9a-f]+", "attempt", ref.key)
                    state[name] = hashlib.sha256(store.get(ref.key)).hexdigest()
    return state


def policy_digests(root: Root) -> list[str]:
    """Of the weights of every version ever published, kept or not."""
    store = _store(root)
    published = [key for key in _keys(store) if re.fullmatch("runs/[^/]+/manifests/[^/]+/publish.json", key)]
    manifests = [parse_manifest(store.get(key), key) for key in published]
    return [ref.digest for manifest in manifests for ref in manifest.named(".safetensors")]


def committed(root: Root) -> set[Work]:
    """The work whose result is in the store. The warm start counts as work of iteration 0."""
    done: set[Work] = set()
    for key in _keys(_store(root)):
        path = PurePosixPath(key)
        if key.endswith("/manifests/start/sft.json"):
            done.add(("train 0", "sft", 0))
        if not path.parent.name.startswith("iteration="):
            continue
        scope = f"{'eval' if '/eval/' in key else 'train'} {int(path.parent.name.partition('=')[2])}"
        if path.suffix == ".parquet" and (stage := STAGE_OF_TABLE.get(_table(key))):
            done.add((scope, stage, int(path.stem.partition("=")[2])))
        elif "/manifests/" in key and path.stem in ("plan", "update", "publish"):
            done.add((scope, path.stem, 0))
    return done


def computed(root: Root) -> list[Work]:
    """Every computation that telemetry recorded, in no order; twice the same means that it was done twice."""
    work = []
    for info in _store(root).list("runs/"):
        path = PurePosixPath(info.key)
        if "telemetry" in path.parts and info.num_bytes:  # what a kill left empty was not written
            scope = f"{'eval' if 'eval' in path.parts else 'train'} {int(path.parent.name.partition('=')[2])}"
            stage, shard, _ = path.name.split(".", 2)
            work.append((scope, stage, int(shard)))
    return work


def _store(root: Root) -> ObjectStore:
    return open_store(str(root)) if isinstance(root, Path) else root


def _keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list("runs/")]


def _table(key: str) -> str:
    parts = key.split("/")[2:]
    return parts[1] if parts[0] == "eval" else parts[0]
