"""SQL: right answers, and no way out of the process."""

import os
import signal
import threading
from pathlib import Path

import pytest

from posttrain_core.errors import ConfigError
from posttrain_core.inspect import Run
from posttrain_core.inspect.query import sql
from posttrain_core.layout import Scope
from posttrain_core.manifest import read_table
from posttrain_core.records import Execution, Purpose, Verdict


def test_rollouts_carry_their_verdicts_and_executions(run: Run) -> None:
    scope = Scope(2, Purpose.EVAL)
    verdicts, executions = (
        {
            row.rollout_id: row
            for ref in run.manifests([scope], stage)[scope].objects
            for row in read_table(run.store, ref, kind)
        }
        for stage, kind in (("verify", Verdict), ("execute", Execution))
    )
    rows = sql(run, "select * from rollouts where purpose = 'eval' and iteration = 2").to_pylist()
    assert len(rows) == len(verdicts) == 24
    for row in rows:
        verdict = verdicts[row["rollout_id"]]
        assert (row["reward"], row["outcome"], row["evidence"]) == (verdict.reward, verdict.outcome, verdict.evidence)
        assert (tuple(row["flags"]), dict(row["breakdown"])) == (verdict.flags, dict(verdict.breakdown))
        assert row["execution_status"] == executions[row["rollout_id"]].status


def test_iterations_agree_with_the_rollouts(run: Run) -> None:
    query = """
        select i.iteration, i.reward_mean, i.pass_rate, i.loss, r.reward, r.passed
        from iterations i join (
            select iteration, avg(reward) as reward, avg((reward >= 1)::int) as passed
            from rollouts where purpose = 'train' group by iteration
        ) r using (iteration) order by iteration
    """
    rows = sql(run, query).to_pylist()
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["reward_mean"] == pytest.approx(row["reward"])
        assert row["pass_rate"] == pytest.approx(row["passed"])
        assert row["loss"] is not None
    assert max(row["reward"] for row in rows) > 0


def test_evaluations_agree_with_the_rollouts(run: Run) -> None:
    query = """
        select version, domain, num_rollouts, pass_rate, (
            select avg((reward >= 1)::int) from rollouts r
            where purpose = 'eval' and iteration = version and e.domain in ('', r.domain)
        ) as expected from evaluations e
    """
    rows = sql(run, query).to_pylist()
    assert {(row["version"], row["domain"]) for row in rows} == {
        (version, domain) for version in (0, 2, 4) for domain in ("", "logic", "program")
    }
    assert all(row["pass_rate"] == pytest.approx(row["expected"]) for row in rows)


def test_telemetry_has_every_stage(run: Run) -> None:
    rows = sql(run, "select stage, min(ended - started) t from telemetry group by stage order by stage").to_pylist()
    assert [row["stage"] for row in rows] == ["execute", "generate", "plan", "publish", "update", "verify"]
    assert all(row["t"] >= 0 for row in rows)


def test_parameters_and_case(run: Run) -> None:
    found = sql(run, "SELECT count(*) AS n FROM Rollouts WHERE domain = ? AND purpose = ?", ["logic", "eval"])
    assert found.to_pylist() == [{"n": 3 * 12}]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select frm rollouts", "frm"),
        ("select rewrd from rollouts", "rewrd"),
        ("select * from nowhere", "nowhere"),
        ("selec 1", "selec"),
        ("select 1 / 'a'", "a"),
    ],
)
def test_a_wrong_query_is_a_config_error_with_the_tables(query: str, message: str, run: Run) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}.*The tables are .*rollouts"):
        sql(run, query)


def test_no_way_to_files_extensions_or_settings(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    found = sql(run, "select 1 as a")  # a local variable of that name must not be reachable as a table either
    assert found.num_rows == 1
    for query in (
        f"select * from '{secret}'",
        f"select * from read_csv('{secret}')",
        f"select * from read_text('{secret}')",
        f"select * from glob('{tmp_path}/*')",
        f"copy (select 1) to '{tmp_path / 'out.csv'}'",
        f"attach '{tmp_path / 'out.db'}'",
        f"export database '{tmp_path / 'out'}'",
        "install httpfs",
        "load httpfs",
        "select * from 'https://127.0.0.1:9/a.csv'",
        "set enable_external_access = true",
        "select * from found",
    ):
        with pytest.raises(ConfigError):
            sql(run, query)
    assert list(tmp_path.iterdir()) == [secret]


def test_interrupting_a_query_ends_it(run: Run) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sql(run, "select count(*) from range(10000000000) a, range(1000000) b where a.range % 7 = b.range % 3")
    timer.join()
