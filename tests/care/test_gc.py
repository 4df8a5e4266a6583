"""gc removes what nothing needs, and nothing that a run, a resume or a fork needs."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_core import layout
from posttrain_core.care.delete import delete_run
from posttrain_core.care.fork import fork
from posttrain_core.care.fsck import check_run
from posttrain_core.care.gc import Garbage, Kind, find_garbage, remove_garbage
from posttrain_core.errors import ConfigError, ObjectCorrupt, RunConflict
from posttrain_core.inspect.catalogue import Run, list_runs
from posttrain_core.layout import Scope
from posttrain_core.lease import Lease
from posttrain_core.manifest import find_manifest
from posttrain_core.records import Purpose
from posttrain_core.store import ObjectStore, open_store
from posttrain_core.store.protocol import ObjectInfo
from tests.care.stores import digests, forked, train
from tests.crash.harness import launch, nothing_computed_again, semantic_state
from tests.crash.test_kills import scripted
from tests.test_faults import train_until

STORES = pytest.mark.parametrize("own_store", ["memory", "local", "s3"], indirect=True)
GARBAGE = {
    "runs/r/policies/version=00004/attempt=lost/model.safetensors": Kind.LOST,
    "runs/r/policies/version=00000/attempt=lost/model.safetensors": Kind.LOST,
    "runs/r/checkpoints/iteration=00003/attempt=lost/model.safetensors": Kind.LOST,
    "runs/r/policies/version=00005/attempt=dead/model.safetensors": Kind.UNFINISHED,
    "runs/r/checkpoints/iteration=00004/attempt=dead/model.safetensors": Kind.UNFINISHED,
    "runs/r/policies/version=00002/attempt=old/model.safetensors": Kind.RETIRED,
    "runs/r/verdicts/set=other/iteration=00001/shard=0000.parquet": Kind.TABLE,
    "runs/r/eval/verdicts/set=other/iteration=00002/shard=0000.parquet": Kind.TABLE,
    f"{layout.journal('r', Scope(1), 0)}0000.x.parquet": Kind.JOURNAL,
    f"{layout.journal('r', Scope(2, Purpose.EVAL), 1)}0000.x.parquet": Kind.JOURNAL,
    "runs/gone/plan/iteration=00000/shard=0000.parquet": Kind.GONE,
    "runs/gone/manifests/iteration=00000/plan.json": Kind.GONE,
}
MARK = "runs/gone/deleted.json"
NEEDED = [
    "runs/r/rollouts/iteration=00004/shard=0000.parquet",
    "runs/r/eval/rollouts/iteration=00005/shard=0000.parquet",
    f"{layout.journal('r', Scope(4), 0)}0000.x.parquet",
    f"{layout.journal('r', Scope(5, Purpose.EVAL), 0)}0000.x.parquet",
    "runs/r/telemetry/iteration=00001/generate.0000.x.json",
    "runs/r/notes.txt",
    "runs/damaged/plan/iteration=00000/shard=0000.parquet",
    "elsewhere/file",
]


def keys(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list("") if not info.key.endswith("lease.json")}


def kinds(found: list[Garbage]) -> dict[str, Kind]:
    return {item.key: item.kind for item in found}


@STORES
def test_a_finished_run_has_none_and_each_kind_is_found(own_store: ObjectStore) -> None:
    assert find_garbage(own_store, 0) == []
    before = keys(own_store)
    for key in [*GARBAGE, *NEEDED, MARK]:
        own_store.put(key, b"12345")
    assert kinds(find_garbage(own_store, 0)) == GARBAGE
    assert {item.num_bytes for item in find_garbage(own_store, 0)} == {5}
    assert keys(own_store) == before | GARBAGE.keys() | {*NEEDED, MARK}, "a dry run deletes nothing"
    removed = remove_garbage(own_store, 0)
    assert kinds(removed.garbage) == GARBAGE
    assert removed.left == {}
    assert keys(own_store) == before | {*NEEDED, MARK}
    assert kinds(remove_garbage(own_store, 0).garbage) == {MARK: Kind.GONE}, "the mark goes last"
    assert keys(own_store) == before | set(NEEDED)
    assert check_run(own_store, "r").findings == []


def test_what_is_young_stays(own_store: ObjectStore) -> None:
    for key in [*GARBAGE, MARK]:
        own_store.put(key, b"")
    assert find_garbage(own_store) == []
    assert remove_garbage(own_store).garbage == []
    assert keys(own_store) >= GARBAGE.keys()


class LaggingStore:
    """A store whose clock is a year behind that of this machine."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def stat(self, key: str) -> ObjectInfo | None:
        return _older(self._store.stat(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return filter(None, map(_older, self._store.list(prefix)))


def _older(info: ObjectInfo | None) -> ObjectInfo | None:
    return info and ObjectInfo(info.key, info.num_bytes, info.etag, info.modified - 365 * 24 * 3600)


def test_age_is_by_the_clock_of_the_store(own_store: ObjectStore) -> None:
    for key in [*GARBAGE, MARK]:
        own_store.put(key, b"")
    assert find_garbage(LaggingStore(own_store)) == []
    assert kinds(find_garbage(LaggingStore(own_store), 0)) == GARBAGE


@pytest.mark.parametrize("own_store", ["local"], indirect=True)
def test_of_a_held_run_only_what_cannot_be_committed_any_more(own_store: ObjectStore) -> None:
    for key in [*GARBAGE, MARK]:
        own_store.put(key, b"")
    with Lease(open_store(own_store.url), "r"), Lease(open_store(own_store.url), "gone"):
        done = remove_garbage(own_store, 0)
        waiting = {key for key, kind in GARBAGE.items() if kind in (Kind.UNFINISHED, Kind.GONE)}
        assert {item.key for items in done.left.values() for item in items} == waiting
        assert keys(own_store) & GARBAGE.keys() == waiting
    assert kinds(remove_garbage(own_store, 0).garbage).keys() == waiting


def test_no_delete_when_a_manifest_cannot_be_read(own_store: ObjectStore) -> None:
    for key in [*GARBAGE, MARK]:
        own_store.put(key, b"")
    own_store.put("runs/other/run.json", b"{}")
    own_store.put("runs/other/manifests/iteration=00000/plan.json", b"damaged")
    with pytest.raises(ObjectCorrupt, match="runs/other/manifests"):
        remove_garbage(own_store, 0)
    assert keys(own_store) >= GARBAGE.keys()


class CommittingStore:
    """A store in which a run commits an attempt between gc's first look and its deletes."""

    def __init__(self, store: ObjectStore, key: str, data: bytes) -> None:
        self._store, self._key, self._data = store, key, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        if key.endswith("lease.json"):
            self._store.put_if_absent(self._key, self._data)
        return self._store.put_if_match(key, data, etag)


def test_a_commit_between_look_and_delete_counts(own_store: ObjectStore) -> None:
    manifest = layout.manifest("r", layout.Scope(3), "publish")
    data = own_store.get(manifest)
    own_store.delete(manifest)
    published = find_manifest(_holding(manifest, data), manifest)
    assert published is not None
    unfinished = {ref.key for ref in published.objects}
    assert kinds(find_garbage(own_store, 0)) == dict.fromkeys(unfinished, Kind.UNFINISHED)
    assert remove_garbage(CommittingStore(own_store, manifest, data), 0).garbage == []
    assert check_run(own_store, "r").findings == []


def _holding(key: str, data: bytes) -> ObjectStore:
    from posttrain_core.store.memory import MemoryStore

    store = MemoryStore()
    store.put(key, data)
    return store


# --- forks ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run "r" of four iterations; "f" forked from it at 2; "undisturbed" as "f", already at its end."""
    root = tmp_path_factory.mktemp("family")
    config = scripted(root, checkpoint={"every": 2, "keep_last": 9})
    train(config)
    forked(config, 2, "f")
    train(forked(config, 2, "undisturbed")[0])
    return root


@pytest.fixture
def family(family_root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(family_root, tmp_path / "store"))


def test_a_fork_outlives_its_deleted_parent(family: Path) -> None:
    store = open_store(str(family))
    before = keys(store)
    assert find_garbage(store, 0) == []
    delete_run(store, "r")
    removed = remove_garbage(store, 0).garbage
    assert {item.kind for item in removed} == {Kind.GONE}
    gone = {item.key for item in removed}
    assert any("iteration=00003" in key for key in gone)
    assert any("policies/version=00001" in key for key in gone), "the fork does without"
    assert not [key for key in gone if key.startswith("runs/r/rollouts/iteration=00001")]
    assert keys(store) == before - gone - {"runs/r/run.json"} | {"runs/r/deleted.json"}
    train(Run(store, "f").config.model_copy(update={"store": str(family)}))
    assert digests(family, "f") == digests(family, "undisturbed")
    assert check_run(store, "f").findings == []


def test_what_a_deleted_fork_needed_goes(family: Path) -> None:
    """Weights that the parent retired while the fork needed them."""
    store = open_store(str(family))
    kept = scripted(family, iterations=6, checkpoint={"every": 2, "keep_last": 1})
    train(kept)
    held = {info.key for info in store.list("runs/r/policies/version=00002/")}
    assert held
    assert find_garbage(store, 0) == []
    made = ("f", "undisturbed")
    for name in made:
        delete_run(store, name)
        assert not held & kinds(find_garbage(store, 0)).keys(), "it may still be in the making"
    for note in family.glob("runs/r/forks/*.json"):
        os.utime(note, (0, 0))
    found = kinds(remove_garbage(store, 0).garbage)
    assert {found[key] for key in held} == {Kind.RETIRED}
    assert check_run(store, "r").findings == []
    assert {item.key for item in remove_garbage(store, 0).garbage} == {f"runs/{x}/deleted.json" for x in made}
    assert not [key for key in keys(store) if layout.run_of(key) in made]


def test_a_fork_in_the_making_keeps_what_it_will_name(family: Path) -> None:
    """It has left its note, and its parent is deleted before it has a run record."""
    store = open_store(str(family))
    for name in ("f", "undisturbed", "r"):
        delete_run(store, name)
    note = json.loads(store.get("runs/r/forks/f.json"))
    held = set(note["objects"])
    assert not held & kinds(find_garbage(store, 0)).keys()
    for name in ("f", "undisturbed"):
        store.delete(layout.fork_note("r", name))
    assert held <= kinds(find_garbage(store, 0)).keys()


# --- runs that go on --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("undisturbed")
    train(scripted(root))
    return semantic_state(root)


@pytest.mark.parametrize(
    "place",
    [
        "executions/iteration=00001",
        "verdicts/.*/iteration=00001",
        "manifests/iteration=00001/update",
        "policies/.*=00002",
    ],
)
def test_a_stopped_run_resumes_as_if_nothing_had_been(place: str, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    config = scripted(tmp_path)
    train_until(config, f"runs/r/{place}")
    store = open_store(str(tmp_path))
    store.put("runs/r/policies/version=00002/attempt=dead/model.safetensors", b"")
    removed = remove_garbage(store, 0).garbage
    assert "runs/r/policies/version=00002/attempt=dead/model.safetensors" in kinds(removed)
    assert {item.kind for item in removed} == {Kind.UNFINISHED}
    with nothing_computed_again(tmp_path):
        train(config)
    assert semantic_state(tmp_path) == undisturbed


def test_beside_a_live_run(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """Again and again, with no grace at all."""
    config = scripted(tmp_path)
    store = open_store(str(tmp_path))
    process = launch(config, log=tmp_path / "log")
    rounds = 0
    try:
        while process.poll() is None:
            remove_garbage(store, 0)
            rounds += 1
    finally:
        process.kill()
    assert process.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    assert rounds > 1
    assert semantic_state(tmp_path) == undisturbed
    assert check_run(store, "r").findings == []


def test_forked_and_deleted_in_memory(own_store: ObjectStore) -> None:
    """A fork of the newest version needs nothing but it."""
    fork(own_store, "r", 4, Run(own_store, "r").config.model_copy(update={"run": "f"}))
    delete_run(own_store, "r")
    remove_garbage(own_store, 0)
    assert check_run(own_store, "f").findings == []


def test_a_deleted_run_is_found_no_more_and_not_begun_again(tmp_path: Path) -> None:
    config = scripted(tmp_path, iterations=0)
    train(config)
    store = open_store(str(tmp_path))
    record = store.get("runs/r/run.json")
    with Lease(open_store(str(tmp_path)), "r"), pytest.raises(RunConflict, match="is held by"):
        delete_run(store, "r")
    delete_run(store, "r")
    delete_run(store, "r")
    assert list_runs(store) == []
    assert json.loads(store.get("runs/r/deleted.json"))["run.json"] == record.decode()
    with pytest.raises(RunConflict, match="was deleted, and its objects are still in"):
        train(config)
    with pytest.raises(ConfigError, match="no run 'other'"):
        delete_run(store, "other")
    for _ in range(2):
        remove_garbage(store, 0)
    assert keys(store) == set()
    train(config)


def test_a_run_that_lost_its_record_is_damaged_not_deleted(own_store: ObjectStore) -> None:
    own_store.delete("runs/r/run.json")
    assert find_garbage(own_store, 0) == []
