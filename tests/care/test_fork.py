"""A fork shares what came before by reference and goes on as the parent would have, or as it is told to."""

import shutil
from pathlib import Path

import pytest

from posttrain_core import layout
from posttrain_core.care import fork as forking
from posttrain_core.care.fsck import check_run
from posttrain_core.care.gc import remove_garbage
from posttrain_core.config import RunConfig
from posttrain_core.errors import ConfigError, RunConflict
from posttrain_core.inspect import open_run, tables
from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.report import report
from posttrain_core.inspect.status import status
from posttrain_core.layout import Scope
from posttrain_core.manifest import parse_manifest
from posttrain_core.store import open_store
from tests.care.stores import digests, forked, iteration_of, train
from tests.crash.harness import launch
from tests.crash.test_kills import scripted


@pytest.fixture(scope="module")
def parent_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations, evaluations of 0, 2 and 4, checkpoints after 1 and 3, everything kept."""
    store: Path = tmp_path_factory.mktemp("parent")
    train(parent(store))
    return store


@pytest.fixture
def store(parent_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(parent_store, tmp_path / "store"))


def parent(store: Path, **changes: object) -> RunConfig:
    return scripted(store, checkpoint={"every": 2, "keep_last": 9}, **changes)


def files(store: Path, run: str) -> dict[str, bytes]:
    return {path.as_posix(): path.read_bytes() for path in store.glob(f"runs/{run}/**/*") if path.is_file()}


@pytest.mark.parametrize("at", [0, 2, 3])
def test_without_changes_it_continues_bit_for_bit(store: Path, at: int) -> None:
    """At 3 the learner's state is a checkpoint and a replayed update."""
    before = files(store, "r")
    config, made = forked(parent(store), at, "twin")
    train(config)
    assert digests(store, "twin") == digests(store, "r")
    assert made.checkpoint == (1 if at else None)
    notes = f"{store}/runs/r/forks/twin.json"
    assert {name: data for name, data in files(store, "r").items() if name != notes} == before, "the parent is written"
    own = {iteration_of(key) for key in files(store, "twin") if key.endswith(".parquet") and "/eval/" not in key}
    assert own == set(range(at, 4)), "shared tables are referred to, not copied"


def test_other_settings_hold_from_there_on(store: Path) -> None:
    config, made = forked(parent(store), 2, "faster", learner={"type": "numpy", "learning_rate": 0.9})
    assert made.changed == ("learner.learning_rate",)
    train(config)
    old, new = digests(store, "r"), digests(store, "faster")
    assert old.keys() == new.keys()
    same = {key for key in old if old[key] == new[key]}
    shared = {key for key in old if iteration_of(key) < 2 or key.startswith("eval/manifests/iteration=00002")}
    assert shared <= same
    assert "manifests/iteration=00002/verify.json" in same, "what precedes the first update is the same"
    assert not [key for key in same if key.endswith("iteration=00003/publish.json")]
    key = layout.manifest("faster", Scope(2), "update")
    update = parse_manifest(open_store(str(store)).get(key), key)
    assert {layout.run_of(ref.key) for ref in update.objects} == {"faster"}


def test_other_domains_and_evaluation_from_there_on(store: Path) -> None:
    """Verifiers and held-out problems may be other ones; the version at the fork is then evaluated anew."""
    domains = {"program": {"type": "program"}, "second": {"type": "program", "weight": 0.5}}
    config, _ = forked(parent(store), 2, "wider", domains=domains)
    train(config)
    rows = tables.read(open_run(str(store), "wider"), "plan", ["iteration", "purpose", "domain"]).to_pylist()
    with_second = {(row["purpose"], row["iteration"]) for row in rows if row["domain"] == "second"}
    assert with_second == {("train", 2), ("train", 3), ("eval", 2), ("eval", 4)}


def test_it_can_be_inspected(store: Path) -> None:
    config, _ = forked(parent(store), 2, "twin")
    run = open_run(str(store), "twin")
    assert status(run).policy_version == 2
    assert (
        tables.read(run, "rollouts").num_rows
        == tables.read(open_run(str(store), "r"), "rollouts").num_rows - 2 * 24 - 12
    )
    train(config)
    assert report(open_run(str(store), "twin")).iterations == report(open_run(str(store), "r")).iterations
    assert status(open_run(str(store), "twin")).state == "complete"


def test_what_it_needs_outlives_the_parents_retention(store: Path) -> None:
    undisturbed, _ = forked(parent(store), 3, "undisturbed")
    train(undisturbed)
    config, _ = forked(parent(store), 3, "late")
    train(
        parent(store, iterations=6).model_copy(
            update={"checkpoint": parent(store).checkpoint.model_copy(update={"keep_last": 1})}
        )
    )
    assert (store / "runs/r/retired/policies/00003.json").exists()
    train(config)
    assert digests(store, "late") == digests(store, "undisturbed")


def test_forks_of_forks(store: Path) -> None:
    config, _ = forked(parent(store), 2, "child")
    grandchild, _ = forked(config, 2, "grandchild")
    kept = parent(store).checkpoint.model_copy(update={"keep_last": 1})
    for owner in (parent(store, iterations=6), config.model_copy(update={"iterations": 6})):
        train(owner.model_copy(update={"checkpoint": kept}))
    assert (store / "runs/child/retired/policies/00002.json").exists()
    train(grandchild)
    assert digests(store, "grandchild") == {
        key: value
        for key, value in digests(store, "r").items()
        if iteration_of(key) < 4 or "eval/manifests/iteration=00004" in key
    }


@pytest.mark.parametrize(
    ("at", "changes", "message"),
    [
        (5, {}, "version 5 was not published; possible: 0, 1, 2, 3, 4"),
        (3, {"learner": {"type": "numpy", "learning_rate": 0.1}}, "2 left none .* with these settings: 0, 2, 4"),
        (2, {"seed": 1}, "cannot change seed: version 0"),
        (2, {"model": {"dtype": "bfloat16"}}, "cannot change model.dtype"),
    ],
)  # fmt: skip
def test_what_cannot_be(store: Path, at: int, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        forked(parent(store), at, "no", **changes)
    assert not (store / "runs/no/run.json").exists()


def test_retired_versions_are_named(tmp_path: Path) -> None:
    config = scripted(tmp_path, checkpoint={"every": 2, "keep_last": 1})
    train(config)
    with pytest.raises(ConfigError, match=r"version 2 was retired .*; possible: 0, 4$"):
        forked(config, 2, "no")
    own, made = forked(config, 4, "more", iterations=5)
    assert made.checkpoint == 3
    train(own)
    train(config.model_copy(update={"iterations": 5}))
    assert (
        digests(tmp_path, "more")["manifests/iteration=00004/publish.json"]
        == digests(tmp_path, "r")["manifests/iteration=00004/publish.json"]
    )


def test_a_taken_name_and_leftovers_are_refused(store: Path) -> None:
    with pytest.raises(RunConflict, match="exists"):
        forked(parent(store), 2, "r")
    left = store / "runs/ghost/plan/iteration=00002/shard=0000.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of a run that is no more")
    with pytest.raises(RunConflict, match=r"holds 1 objects of another run"):
        forked(parent(store), 2, "ghost")


def test_one_that_was_cut_short_is_made_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(forking, "_check_still_there", cut)
        with pytest.raises(InterruptedError):
            forked(parent(store), 2, "twin")
    config, _ = forked(parent(store), 2, "twin")
    train(config)
    assert digests(store, "twin") == digests(store, "r")


def test_retired_while_it_is_made(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's process put its tombstone down before it could see the note."""
    leave = forking._leave_notes

    def late(*arguments: object) -> None:
        leave(*arguments)  # type: ignore[arg-type]
        open_store(str(store)).put_if_absent(layout.retired("r", "policies", 2), b"{}")

    monkeypatch.setattr(forking, "_leave_notes", late)
    with pytest.raises(RunConflict, match="while it was being made; possible now: 0, 1, 3, 4"):
        forked(parent(store), 2, "twin")
    assert not (store / "runs/twin/run.json").exists()


def test_of_a_live_run(tmp_path: Path) -> None:
    """Its retention deletes while forks are made; whoever comes too late is told, and the others are whole."""
    config = scripted(tmp_path, checkpoint={"every": 1, "keep_last": 1}, eval={"every": 9, "num_problems": 2})
    process = launch(config, log=tmp_path / "log")
    store, made = open_store(str(tmp_path)), []
    try:
        while process.poll() is None:
            if len(made) == 6:
                process.wait()
                break
            try:
                versions = Run(store, "r").policy_versions
                forked(config, versions[-1] if versions else 0, f"f{len(made)}")
                made.append(f"f{len(made)}")
            except (ConfigError, RunConflict):
                continue
    finally:
        process.kill()
    assert process.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    remove_garbage(store, 0)
    assert made
    assert [check_run(store, name).findings for name in ["r", *made]] == [[]] * (len(made) + 1)
    last = Run(store, made[-1]).config
    train(last)
    shared = digests(tmp_path, "r")
    assert {key: shared.get(key) for key in digests(tmp_path, last.run)} == digests(tmp_path, last.run)
