"""What is there is what manifests say is there, however it is stored."""

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest

from posttrain_core import layout
from posttrain_core.errors import ConfigError, ObjectCorrupt, ObjectNotFound, RunConflict
from posttrain_core.inspect import Run, list_runs, open_run
from posttrain_core.inspect.query import sql
from posttrain_core.inspect.tables import STAGE_OF_TABLE, read
from posttrain_core.inspect.timeline import intervals
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, ObjectRef, commit_manifest, commit_table
from posttrain_core.records import Execution, FinishReason, Outcome, Purpose, Rollout
from posttrain_core.store import open_store
from posttrain_core.store.local import LocalStore
from posttrain_core.store.memory import MemoryStore


def in_memory(folder: Path) -> MemoryStore:
    store = MemoryStore()
    for info in LocalStore(folder).list("runs/"):
        store.put(info.key, (folder / info.key).read_bytes())
    return store


def test_the_catalogue_knows_what_the_run_did(run: Run) -> None:
    assert run.iterations == [0, 1, 2, 3]
    assert run.evaluations == [0, 2, 4]
    assert run.policy_versions == [0, 1, 2, 3, 4]
    assert run.committed[Scope(3)] == ("plan", "generate", "execute", "verify", "update", "publish")
    assert run.committed[Scope(2, Purpose.EVAL)] == ("plan", "generate", "execute", "verify")
    assert run.config.plan.group_size == 4


def test_an_unknown_run_is_named_with_the_nearest(own_store: Path) -> None:
    (own_store / "runs/r").rename(own_store / "runs/arithmetic")
    with pytest.raises(ConfigError, match=r"no run 'aritmetic'.*did you mean 'arithmetic'"):
        open_run(str(own_store), "aritmetic")
    with pytest.raises(ConfigError, match="no runs in"):
        open_run(str(own_store / "elsewhere"))


def test_the_newest_run_is_taken_when_none_is_named(own_store: Path) -> None:
    shutil.copytree(own_store / "runs/r", own_store / "runs/a")
    record = own_store / "runs/a/run.json"
    text = re.sub('"created": "....', '"created": "9999', record.read_text())
    record.write_text(text)
    with pytest.warns(UserWarning, match="is the record of run 'r': the folder was renamed"):
        assert open_run(str(own_store)).name == "r"
    with pytest.raises(RunConflict, match="name it back"):
        open_run(str(own_store), "a")
    record.write_text(text.replace('"run": "r"', '"run": "a"'))
    assert open_run(str(own_store)).name == "a"
    assert [run.name for run in list_runs(in_memory(own_store))] == ["r", "a"]


def test_a_damaged_record_hides_no_other_run(own_store: Path) -> None:
    (own_store / "runs/broken").mkdir()
    for text in ("", "{}", "[]", "{"):
        (own_store / "runs/broken/run.json").write_text(text)
        with pytest.warns(UserWarning, match="left out"):
            assert [run.name for run in list_runs(open_store(str(own_store)))] == ["r"]
        with pytest.raises(ObjectCorrupt, match=r"runs/broken/run.json"):
            open_run(str(own_store), "broken")


def test_damaged_telemetry_is_left_out(own_store: Path) -> None:
    run = open_run(str(own_store), "r")
    before = intervals(run)
    paths = sorted((own_store / "runs/r/telemetry").rglob("*.json"))
    for path, text in zip(paths, ("zzz", "[]", "{}"), strict=False):
        path.write_text(text)
    assert len(intervals(run)) == len(before) - 3


@pytest.mark.parametrize("name", STAGE_OF_TABLE)
def test_a_store_without_paths_gives_the_same_rows(name: str, run: Run, finished_run: Path) -> None:
    remote = Run(in_memory(finished_run), "r")
    assert read(remote, name).equals(read(run, name))


def test_rows_carry_iteration_and_purpose(run: Run) -> None:
    rows = read(run, "verdicts", ["iteration", "purpose", "rollout_id"]).to_pylist()
    assert {(row["iteration"], row["purpose"]) for row in rows} == {
        *((iteration, "train") for iteration in range(4)),
        *((version, "eval") for version in (0, 2, 4)),
    }
    for row in rows:
        assert row["rollout_id"].startswith(f"{'i' if row['purpose'] == 'train' else 'e'}{row['iteration']:05d}.")


def test_objects_that_no_manifest_names_are_not_there(own_store: Path) -> None:
    folder = own_store / "runs/r/rollouts/iteration=00003"
    shutil.copy(folder / "shard=0000.parquet", folder / "shard=0007.parquet")
    (own_store / "runs/r/manifests/iteration=00003/verify.json").unlink()
    rows = sql(open_run(str(own_store), "r"), "select * from rollouts where iteration = 3 and purpose = 'train'")
    assert rows.num_rows == 24
    assert set(rows["reward"].to_pylist()) == {None}
    assert set(rows["outcome"].to_pylist()) == {"scored"}
    assert None not in rows["execution_status"].to_pylist()


def test_a_flipped_bit_anywhere_is_found(own_store: Path) -> None:
    path = next(own_store.glob("runs/r/verdicts/*/iteration=00001/shard=0001.parquet"))
    whole = path.read_bytes()
    for place in range(0, len(whole), 251):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        with pytest.raises(ObjectCorrupt, match="shard=0001"):
            read(open_run(str(own_store), "r"), "verdicts")


def test_a_large_object_is_checked_page_by_page() -> None:
    store = MemoryStore()
    run, ref = big_run(store)
    whole = store.get(ref.key)
    for tenth in range(1, 10):  # somewhere among the token columns, which are nearly all of it
        at = len(whole) * tenth // 10
        store.put(ref.key, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ObjectCorrupt, match=ref.key):
            read(run, "rollouts", ["response_ids", "sampler_logprobs"])
    assert read(run, "rollouts", ["rollout_id"]).num_rows == 1500  # what is not read is not checked


@pytest.mark.parametrize("memory", [False, True])
def test_damage_is_named(memory: bool, own_store: Path) -> None:
    path = next(own_store.glob("runs/r/verdicts/*/iteration=00001/shard=0001.parquet"))
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    run = Run(in_memory(own_store) if memory else open_store(str(own_store)), "r")
    key = re.escape(path.relative_to(own_store).as_posix())
    with pytest.raises(ObjectCorrupt, match=key):
        read(run, "verdicts")
    with pytest.raises(ObjectCorrupt, match=key):
        sql(run, "select avg(reward), count(flags), max(evidence) from rollouts")


def test_a_missing_object_is_named(own_store: Path) -> None:
    key = "runs/r/samples/iteration=00002/shard=0000.parquet"
    (own_store / key).unlink()
    run = open_run(str(own_store), "r")
    with pytest.raises(ObjectNotFound, match=key):
        read(run, "samples")
    with pytest.raises(ObjectNotFound, match=key):
        sql(run, "select * from samples")
    assert sql(run, "select * from rollouts").num_rows == 4 * 24 + 3 * 24  # what is not named is not opened


def test_only_the_columns_that_are_asked_for_are_fetched() -> None:
    run, ref = big_run(MemoryStore())
    assert run.rollouts("rollout_id", where=ds.field("seed") == 7).to_table().num_rows == 1
    assert sql(run, "select sum(seed) s from rollouts").to_pylist() == [{"s": sum(range(1500))}]
    assert run.store.num_bytes < ref.num_bytes / 4


def big_run(store: MemoryStore) -> tuple[Run, ObjectRef]:
    """A run that has generated one shard of more than 2 MiB."""
    ref = commit_table(store, layout.table("big", "rollouts", Scope(0), 0), "rollouts", big_rollouts(1500), {})
    assert ref.num_bytes > 2 << 20
    manifest = Manifest("generate", 0, {}, (ref,))
    commit_manifest(store, layout.manifest("big", Scope(0), "generate"), manifest, lambda: None)
    return Run(store, "big"), ref


def big_rollouts(num: int) -> list[Rollout]:
    random = np.random.default_rng(0)
    return [
        Rollout(
            rollout_id=f"i00000.p{number:04d}.r00",
            group_id=f"i00000.p{number:04d}",
            problem_id="d/1",
            domain="d",
            purpose=Purpose.TRAIN,
            sample_index=0,
            seed=number,
            policy_version=0,
            messages=(),
            prompt_ids=(),
            response_ids=tuple(random.integers(0, 2**31, 128).tolist()),
            sampler_logprobs=tuple(random.normal(size=128).tolist()),
            loss_mask=(1,) * 128,
            finish_reason=FinishReason.STOP,
            num_prompt_tokens=0,
            num_response_tokens=128,
            text="",
            outcome=Outcome.SCORED,
        )
        for number in range(num)
    ]


def test_a_run_that_has_only_begun_has_empty_tables() -> None:
    run = Run(MemoryStore(), "new")
    assert read(run, "executions").num_rows == 0
    assert read(run, "executions").schema.names[2:] == list(Execution.__dataclass_fields__)
    for name in ("rollouts", "iterations", "evaluations", "telemetry"):
        assert sql(run, f"select count(*) n from {name}").to_pylist() == [{"n": 0}]
