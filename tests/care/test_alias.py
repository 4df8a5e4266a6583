"""An alias is of a version that is there, and keeps it."""

from pathlib import Path

import pytest

from posttrain_core import layout
from posttrain_core.care import alias as aliasing
from posttrain_core.care.alias import point_alias
from posttrain_core.care.delete import delete_run
from posttrain_core.care.export_policy import export_policy
from posttrain_core.care.gc import Kind, find_garbage, remove_garbage
from posttrain_core.errors import ConfigError, RunConflict
from posttrain_core.inspect import Run
from posttrain_core.registry import Target, history, set_alias
from posttrain_core.store import ObjectStore
from tests.care.stores import forked, train
from tests.crash.test_kills import scripted


def weights(store: ObjectStore, version: int) -> set[str]:
    return {info.key for info in store.list(f"runs/r/policies/version={version:05d}/")}


def test_a_version_that_is_not_there_is_refused(own_store: ObjectStore) -> None:
    run = Run(own_store, "r")
    for version, why in ((2, "was retired"), (9, "was not published")):
        with pytest.raises(ConfigError, match=rf"policy version {version} of run 'r' .*{why}.*; possible: 0, 4$"):
            point_alias(run, "math", "best", version)
    assert history(own_store, "math") == []
    delete_run(own_store, "r")
    with pytest.raises(ConfigError, match="no run 'r'"):
        point_alias(Run(own_store, "r"), "math", "best", 4)


def test_retired_before_the_alias_could_be_seen(own_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*arguments: object) -> None:
        own_store.put(layout.retired("r", "policies", 4), b"{}")
        set_alias(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(aliasing, "set_alias", late)
    with pytest.raises(RunConflict, match="retired policy version 4 while the alias was moved"):
        point_alias(Run(own_store, "r"), "math", "best", 4)
    for key in weights(own_store, 4):
        own_store.delete(key)
    with pytest.raises(ConfigError, match=r"version 4 .* was retired .*; possible: 0$"):
        point_alias(Run(own_store, "r"), "math", "best", 4)


def test_what_an_alias_kept_can_be_had_until_it_moves(own_store: ObjectStore, tmp_path: Path) -> None:
    run = Run(own_store, "r")
    point_alias(run, "math", "best", 4)
    own_store.put(layout.retired("r", "policies", 4), b"{}")
    assert remove_garbage(own_store, 0).garbage == []
    point_alias(run, "math", "safe", 4)
    assert export_policy(run, tmp_path / "policy", 4).num_files > 0
    for alias in ("best", "safe"):
        assert find_garbage(own_store, 0) == []
        point_alias(run, "math", alias, 0)
    assert {item.key: item.kind for item in find_garbage(own_store, 0)} == dict.fromkeys(
        weights(own_store, 4), Kind.RETIRED
    )


def test_of_a_deleted_run_the_aliased_version_stays_until_the_alias_moves(own_store: ObjectStore) -> None:
    kept = weights(own_store, 4)
    point_alias(Run(own_store, "r"), "math", "best", 4)
    delete_run(own_store, "r")
    remove_garbage(own_store, 0)
    assert {info.key for info in own_store.list("runs/r/")} >= kept | {layout.policy_manifest("r", 4)}
    assert not list(own_store.list("runs/r/rollouts/"))
    set_alias(own_store, "math", "best", Target("other", 0, ""))
    assert kept <= {item.key for item in find_garbage(own_store, 0)}


def test_retention_keeps_what_an_alias_of_a_fork_reaches(tmp_path: Path) -> None:
    """The fork is gone, and with it its note; its version 2 lies with its parent."""
    config = scripted(tmp_path, checkpoint={"every": 2, "keep_last": 9})
    train(config)
    forked(config, 2, "f")
    run = Run(str(tmp_path), "f")
    point_alias(run, "math", "best", 2)
    delete_run(run.store, "f")
    run.store.delete(layout.fork_note("r", "f"))
    train(scripted(tmp_path, iterations=6, checkpoint={"every": 2, "keep_last": 1}))
    assert weights(run.store, 2)
    assert not weights(run.store, 3)
    remove_garbage(run.store, 0)
    assert weights(run.store, 2)
