"""Weights come to this machine once per version, whoever asks, and leave it with the version."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from posttrain_core.errors import ObjectCorrupt
from posttrain_core.lease import Lease
from posttrain_core.manifest import Manifest, commit_folder
from posttrain_core.stages.context import Run
from posttrain_core.store.memory import MemoryStore
from tests.crash.test_kills import scripted


class CountingStore(MemoryStore):
    """Counts what is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: Counter[str] = Counter()

    def get_file(self, key: str, path: Path) -> None:
        self.fetched[key] += 1
        super().get_file(key, path)


def published(store: MemoryStore, version: int, folder: Path) -> Manifest:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(f"weights {version}")
    prefix = f"runs/r/policies/version={version:05d}/attempt=a/"
    refs = commit_folder(store, prefix, folder, semantic=True)
    return Manifest("publish", version - 1, {}, tuple(refs), notes={"prefix": prefix})


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def run(store: CountingStore, tmp_path: Path) -> Run:
    return Run(store, scripted(tmp_path), Lease(store, "r"), tmp_path / "scratch")


def test_many_shards_fetch_a_version_once(run: Run, store: CountingStore, tmp_path: Path) -> None:
    policy = published(store, 1, tmp_path / "policy")
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(run.policy_folder, [policy] * 32))
    assert len(folders) == 1
    assert (folders.pop() / "model.safetensors").read_text() == "weights 1"
    assert set(store.fetched.values()) == {1}


def test_only_the_reference_and_the_version_in_use_stay(run: Run, store: CountingStore, tmp_path: Path) -> None:
    policies = [published(store, version, tmp_path / "policy") for version in range(4)]
    for version in (0, 1, 2, 0, 3):
        folder = run.policy_folder(policies[version])
        assert (folder / "model.safetensors").read_text() == f"weights {version}"
    kept = {path.read_text() for path in (tmp_path / "scratch").rglob("*.safetensors")}
    assert kept == {"weights 0", "weights 3"}
    assert set(store.fetched.values()) == {1}


def test_a_version_that_is_damaged_is_not_taken_for_a_held_one(run: Run, store: CountingStore, tmp_path: Path) -> None:
    policy = published(store, 1, tmp_path / "policy")
    whole = store.get(policy.objects[0].key)
    store.put(policy.objects[0].key, b"weights 9")
    for _ in range(2):
        with pytest.raises(ObjectCorrupt):
            run.policy_folder(policy)
    store.put(policy.objects[0].key, whole)
    assert (run.policy_folder(policy) / "model.safetensors").read_text() == "weights 1"
