"""What is retired goes whole and for good, and of several attempts at a version one stays."""

import re
from pathlib import Path
from typing import Any

import pytest

from flows import pipeline
from posttrain_core.care.alias import point_alias
from posttrain_core.config import RunConfig
from posttrain_core.inspect import Run
from posttrain_core.store import ObjectStore, open_store
from tests.crash.harness import finish
from tests.crash.test_kills import scripted
from tests.test_faults import train

ATTEMPT = re.compile(r"(policies|checkpoints)/\w+=(\d+)/(attempt=\w+)")


def attempts(root: Path) -> dict[tuple[str, int], set[str]]:
    """The attempts with objects, of each kind and number."""
    found: dict[tuple[str, int], set[str]] = {}
    for path in root.glob("runs/r/*/*/attempt=*/**/*"):
        if path.is_file() and (match := ATTEMPT.search(path.as_posix())):
            found.setdefault((match[1], int(match[2])), set()).add(match[3])
    return found


def keeping(store: Path, keep_every: int) -> RunConfig:
    return scripted(store, iterations=5, checkpoint={"every": 1, "keep_last": 1, "keep_every": keep_every})


def test_attempts_of_killed_processes_go(tmp_path: Path) -> None:
    points = [(rf"r/{place}", "after") for place in ("policies/version=00000", "policies/version=00001") * 2]
    points += [("r/checkpoints/iteration=00001", "after")] * 2
    config = scripted(tmp_path, iterations=2, checkpoint={"every": 1, "keep_last": 5})
    finish(config, tmp_path, sorted(points, key=lambda point: point[0].rpartition("=")[2]))
    found = attempts(tmp_path)
    assert sorted(found) == [("checkpoints", 0), ("checkpoints", 1), *(("policies", number) for number in range(3))]
    assert {len(names) for names in found.values()} == {1}


def test_attempts_of_a_process_killed_at_the_last_moment_go_with_the_next(tmp_path: Path) -> None:
    config = scripted(tmp_path, iterations=1)
    train(config)
    (named,) = attempts(tmp_path)["policies", 1]
    leftover = tmp_path / "runs/r/policies/version=00001/attempt=dead/model.safetensors"
    leftover.parent.mkdir()
    leftover.write_bytes(b"weights")
    uncommitted = tmp_path / "runs/r/policies/version=00002/attempt=busy/model.safetensors"
    uncommitted.parent.mkdir(parents=True)
    uncommitted.write_bytes(b"weights")
    train(config)
    assert attempts(tmp_path)["policies", 1] == {named}
    assert uncommitted.exists(), "its attempt may still commit"


class UndeletableStore:
    """A store whose process ends when it is to delete the first checkpoint."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def delete(self, key: str) -> None:
        if "checkpoints/iteration=00000" in key:
            raise InterruptedError(key)
        self._store.delete(key)


def test_deletes_cut_short_are_finished_whatever_is_kept_since(tmp_path: Path) -> None:
    train(keeping(tmp_path, 2))
    lowered = keeping(tmp_path, 0).model_copy(update={"iterations": 6})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "open_store", lambda url: UndeletableStore(open_store(url)))
        with pytest.raises(InterruptedError):
            train(lowered)
    assert list(tmp_path.glob("runs/r/retired/checkpoints/00000.json"))
    assert ("checkpoints", 0) in attempts(tmp_path), "the deletes were not cut short"
    train(lowered)
    assert sorted(attempts(tmp_path)) == [("checkpoints", 5), ("policies", 0), ("policies", 6)]


def test_what_an_alias_points_at_stays_until_it_moves(tmp_path: Path) -> None:
    train(keeping(tmp_path, 0).model_copy(update={"iterations": 1}))
    point_alias(Run(str(tmp_path), "r"), "math", "best", 1)
    config = keeping(tmp_path, 0).model_copy(update={"iterations": 4})
    train(config)
    assert (tmp_path / "runs/r/retired/policies/00001.json").exists()
    kept = [("checkpoints", 3), ("policies", 0), ("policies", 1), ("policies", 4)]
    assert sorted(attempts(tmp_path)) == kept
    train(config)
    assert sorted(attempts(tmp_path)) == kept
    point_alias(Run(str(tmp_path), "r"), "math", "best", 4)
    train(config)
    assert sorted(attempts(tmp_path)) == [("checkpoints", 3), ("policies", 0), ("policies", 4)]
