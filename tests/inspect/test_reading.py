"""What is read of a store to answer: the manifests, columns and row groups that a question needs, and no more."""

import hashlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from posttrain_core import layout
from posttrain_core.errors import ObjectCorrupt
from posttrain_core.inspect import Run, list_runs
from posttrain_core.inspect.query import pick, sql
from posttrain_core.inspect.show import show
from posttrain_core.inspect.tables import read
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, ObjectRef, commit_manifest
from posttrain_core.records import Purpose
from posttrain_core.store import ObjectInfo, ObjectStore, open_store
from posttrain_core.store.local import LocalStore
from posttrain_core.store.memory import MemoryStore


def table_bytes(store: Path, run: str) -> int:
    return sum(path.stat().st_size for path in (store / "runs" / run).rglob("*.parquet"))


@pytest.mark.parametrize(
    ("query", "share"),
    [
        ("select count(*) from rollouts", 0.02),
        ("select avg(reward) from rollouts", 0.06),
        ("select avg(reward) from rollouts where iteration = 1 and purpose = 'train'", 0.01),
        ("select sum(seed) from rollouts where iteration = 1 and purpose = 'train'", 0.03),
        ("select count(*) from rollouts where domain = 'logic' and iteration in (1, 2) and purpose = 'train'", 0.05),
        ("select text from rollouts where rollout_id = 'i00002.p0005.r03' and iteration = 2", 0.06),
    ],
)
def test_a_question_reads_its_share_of_the_tables(query: str, share: float, made_up_store: Path) -> None:
    run = Run(str(made_up_store), "large")
    assert sql(run, query).num_rows == 1
    assert 0 < run.store.num_bytes < share * table_bytes(made_up_store, "large")


def test_choosing_rows_reads_the_long_columns_of_those_rows_alone(made_up_store: Path) -> None:
    everything = Run(str(made_up_store), "large")
    rows = everything.rollouts("rollout_id", "num_response_tokens", "response_ids").to_pylist()
    longest = sorted(rows, key=lambda row: (-row["num_response_tokens"], row["rollout_id"]))[:3]
    run = Run(str(made_up_store), "large")
    found = pick(run, ["rollout_id", "response_ids"], "", [], "num_response_tokens desc, rollout_id", 3)
    assert found.to_pylist() == [
        {"rollout_id": row["rollout_id"], "response_ids": row["response_ids"]} for row in longest
    ]
    assert run.store.num_bytes < everything.store.num_bytes * 0.7
    assert pick(run, ["text"], "domain = ?", ["nope"], "rollout_id").num_rows == 0


def test_one_rollout_is_shown_from_its_iteration_alone(made_up_store: Path) -> None:
    run = Run(str(made_up_store), "large")
    assert "rollout i00002.p0005.r03" in show(run, "i00002.p0005.r03")
    assert run.store.num_bytes < table_bytes(made_up_store, "large") / 4


class ListedStore(LocalStore):
    """Notes every key that is listed or read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.seen: list[str] = []

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix, after):
            self.seen.append(info.key)
            yield info

    def get(self, key: str) -> bytes:
        self.seen.append(key)
        return super().get(key)


@pytest.mark.parametrize(
    "condition",
    [
        "iteration = 7",
        "iteration in (3, 11)",
        "iteration between 1 and 10",
        "iteration < 3 or iteration = 10",
        "iteration >= 1 and iteration < 11 and domain = 'arithmetic'",
    ],
)
def test_iterations_that_a_question_does_not_touch_cost_nothing(condition: str, made_up_store: Path) -> None:
    seen, answers = {}, {}
    for name in ("short", "long"):
        store = ListedStore(made_up_store)
        query = f"select iteration, avg(reward) r, count(*) n from rollouts where purpose = 'train' and {condition}"
        answers[name] = sql(Run(store, name), f"{query} group by iteration order by iteration").to_pylist()
        seen[name] = sorted(key.replace(f"runs/{name}/", "") for key in store.seen)
    assert seen["short"] == seen["long"]
    assert len(answers["short"]) == len(answers["long"]) >= 1
    named = {int(number) for key in seen["long"] for number in re.findall(r"iteration=(\d+)/shard", key)}
    assert named == {row["iteration"] for row in answers["long"]}


FIELD = ds.field
FILTERS = [
    FIELD("iteration") == 2,
    (FIELD("iteration") != 2) & (FIELD("purpose") == "eval"),
    FIELD("iteration").isin([0, 3, 99]),
    FIELD("domain").isin(["logic", "strings"]) & (FIELD("reward") >= 0.75),
    (FIELD("reward") < 0.25) | (FIELD("iteration") > 2),
    ~(FIELD("domain") == "logic") & (FIELD("outcome") == "truncated"),
    FIELD("rollout_id") == "i00001.p0003.r01",
    FIELD("rollout_id") > "i00003",
    FIELD("reward").is_null() | (FIELD("num_response_tokens") == 40),
    FIELD("iteration") < 0,
]


@pytest.mark.parametrize("where", FILTERS, ids=str)
def test_a_filter_finds_what_reading_everything_finds(where: ds.Expression, made_up_store: Path) -> None:
    run = Run(str(made_up_store), "large")
    columns = ["rollout_id", "iteration", "text", "breakdown"]
    everything = read(run, "rollouts").filter(where).select(columns)
    assert read(run, "rollouts", columns, where).equals(everything)


def test_rows_of_several_tables_are_about_the_same_rollout(run: Run) -> None:
    """By a join on the ids, of what other readers see."""
    folder = Path(run.store.url) / "runs/r"
    ours = run.rollouts("rollout_id", "reward", "execution_status", purpose="train").to_pylist()
    verdicts, executions = (
        {
            row["rollout_id"]: row
            for path in folder.glob(f"{name}/**/*.parquet")
            for row in pq.read_table(path).to_pylist()
        }
        for name in ("verdicts", "executions")
    )
    assert len(ours) == len(verdicts) == len(executions) == 4 * 24
    for row in ours:
        assert row["reward"] == verdicts[row["rollout_id"]]["reward"]
        assert row["execution_status"] == executions[row["rollout_id"]]["status"]


def put_table(store: ObjectStore, key: str, table: pa.Table, group_rows: int) -> ObjectRef:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=group_rows, write_page_checksum=True)
    store.put(key, sink.getvalue())
    return ObjectRef(key, hashlib.sha256(sink.getvalue()).hexdigest(), len(sink.getvalue()), table.num_rows)


def regrouped(made_up_store: Path, verdict_rows: int) -> tuple[Run, pa.Table]:
    """One iteration as one shard in row groups of 100; the first `verdict_rows` of its verdicts in such ones too."""
    source, store = Run(str(made_up_store), "large"), MemoryStore()
    rows = {name: source.rows(name, iteration=1, purpose="train").to_table() for name in ("rollout_rows", "verdicts")}
    tables = {"rollouts": rows["rollout_rows"].drop(["iteration"]), "verdicts": rows["verdicts"].slice(0, verdict_rows)}
    for name, stage in (("rollouts", "generate"), ("verdicts", "verify")):
        ref = put_table(store, layout.table("g", name, Scope(1), 0), tables[name].drop(["purpose"]), 100)
        commit_manifest(store, layout.manifest("g", Scope(1), stage), Manifest(stage, 1, {}, (ref,)), lambda: None)
    return Run(store, "g"), source.rollouts(iteration=1, purpose="train").to_table()


def test_only_the_row_groups_in_which_something_can_match_are_read(made_up_store: Path) -> None:
    run, expected = regrouped(made_up_store, 1024)
    columns = ("rollout_id", "response_ids", "reward")
    assert run.rollouts(*columns).to_table().equals(expected.select(columns))
    everything = run.store.num_bytes
    where = FIELD("rollout_id") == "i00001.p0077.r03"
    assert run.rollouts(*columns, where=where).to_table().equals(expected.filter(where).select(columns))
    assert run.store.num_bytes - everything < everything / 4


def test_tables_of_different_length_are_not_laid_side_by_side(made_up_store: Path) -> None:
    run, _ = regrouped(made_up_store, 1000)
    assert run.rollouts("text").to_table().num_rows == 1024
    with pytest.raises(
        ObjectCorrupt, match=r"rollouts/iteration=00001/shard=0000.*1024 rows, but .*verdicts.* has 1000"
    ):
        run.rollouts("reward").to_table()


def test_an_object_that_was_cut_off_is_named(made_up_store: Path) -> None:
    run, _ = regrouped(made_up_store, 1024)
    key = layout.table("g", "rollouts", Scope(1), 0)
    whole = run.store.get(key)
    for length in (len(whole) // 2, len(whole) - 1, 100, 0):
        run.store.put(key, whole[:length])
        with pytest.raises(ObjectCorrupt, match=key):
            Run(run.store, "g").rollouts("text").to_table()


def test_a_reader_that_stops_early_leaves_nothing_behind(made_up_store: Path) -> None:
    """Reads that are under way when the interpreter ends must not bring it down."""
    code = f"""
import time
from pathlib import Path
from posttrain_core.inspect import Run
from posttrain_core.store.local import LocalStore

class SlowStore(LocalStore):
    def get_range(self, key, start, length):
        time.sleep(0.05)
        return super().get_range(key, start, length)

run = Run(SlowStore(Path({str(made_up_store)!r})), "large")
rows = iter(run.rollouts())
first = next(rows)
assert run.sql("select text from rollouts limit 1").num_rows == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_s3_gives_the_same_answers(finished_run: Path, run: Run, s3_url: str) -> None:
    remote = open_store(s3_url)
    for info in LocalStore(finished_run).list("runs/"):
        remote.put(info.key, (finished_run / info.key).read_bytes())
    for name in ("r-2", "r0"):  # they sort before and after r/
        remote.put(
            layout.run_record(name),
            finished_run.joinpath("runs/r/run.json").read_bytes().replace(b'"r"', f'"{name}"'.encode()),
        )
    assert sorted(known.name for known in list_runs(remote)) == ["r", "r-2", "r0"]
    there = Run(s3_url, "r")
    for question in (
        "select * from rollouts order by rollout_id",
        "select iteration, avg(reward) r from rollouts where iteration > 0 group by 1 order by 1",
        "select * from evaluations order by all",
    ):
        assert sql(there, question).equals(sql(run, question))
    assert show(there, "i00001.p0001.r01") == show(run, "i00001.p0001.r01")


def test_importing_the_package_imports_little() -> None:
    heavy = {"pydantic", "duckdb", "pandas", "pyarrow.dataset", "torch"}
    code = f"import sys, posttrain_core.inspect; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_purposes_that_are_asked_for_alone_are_looked_at(made_up_store: Path) -> None:
    store = ListedStore(made_up_store)
    found: dict[str, Any] = Run(store, "short").rollouts("iteration", purpose=Purpose.EVAL).to_table().to_pydict()
    assert sorted(set(found["iteration"])) == [0, 6, 12]
    assert all(key.startswith("runs/short/eval/") for key in store.seen)
