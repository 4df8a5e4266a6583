"""The commands that look at runs: output, JSON, exit codes, and that they are light."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import app
from flows.cli.output import plain, table
from posttrain_core.errors import StoreError
from posttrain_core.store.local import LocalStore
from posttrain_core.store.memory import MemoryStore
from posttrain_core.store.probe import check_conditional_writes
from tests.cli.conftest import Command
from tests.crash.test_kills import scripted

HEAVY = ("torch", "prefect", "deepspeed", "transformers", "boto3", "matplotlib")


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_read_commands_import_nothing_heavy(finished_run: Path) -> None:
    commands = [
        ["status"],
        ["status", "r"],
        ["show", "i00001.p0001.r01"],
        ["rollouts", "--limit", "1"],
        ["sql", "select count(*) from rollouts"],
        ["--help"],
    ]
    code = f"""
import sys
from flows.cli.main import main
for arguments in {commands!r}:
    sys.argv = ["posttrain", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, arguments
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"POSTTRAIN_STORE": str(finished_run), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_init_writes_once(posttrain: Command, tmp_path: Path) -> None:
    assert posttrain("init", "my.yaml")[0] == 0
    text = (tmp_path / "my.yaml").read_text()
    assert "posttrain run my.yaml" in text
    code, _, error = posttrain("init", "my.yaml")
    assert (code, "my.yaml exists" in error) == (2, True)
    assert (tmp_path / "my.yaml").read_text() == text
    assert posttrain("init", "no/such/folder.yaml")[0] == 2


def test_status(posttrain: Command, tmp_path: Path) -> None:
    code, listing, _ = posttrain("status")
    assert code == 0
    assert listing.splitlines()[1].split()[:4] == ["r", "complete", "4", "4"]
    assert [run["run"] for run in json.loads(posttrain("status", "--json")[1])] == ["r"]
    one = posttrain("status", "r")[1]
    assert "policy version 4 of 4" in one
    found = json.loads(posttrain("status", "r", "--json")[1])
    assert (found["state"], found["policy_version"], found["evaluated"]) == ("complete", 4, [0, 2, 4])
    code, output, _ = posttrain("status", "--store", str(tmp_path / "empty"))
    assert (code, "no runs in" in output) == (0, True)
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "nope"),
        ("report", "nope"),
        ("sql", "select 1", "--run", "nope"),
        ("sql", "selec 1"),
        ("show", "i00009.p0000.r00"),
        ("rollouts", "--outcome", "nope"),
        ("status", "--store", "ftp://x"),
        ("nope",),
    ],
)
def test_a_wrong_call_is_exit_code_2_and_one_message(arguments: tuple[str, ...], posttrain: Command) -> None:
    code, output, error = posttrain(*arguments)
    assert (code, output) == (2, "")
    assert error
    assert "Traceback" not in error


def test_what_a_model_wrote_is_escaped_in_messages_too(posttrain: Command) -> None:
    code, _, error = posttrain("sql", "select text::int from rollouts where text like '%red%'")
    assert code == 2
    assert "red" in error
    assert "\x1b" not in error
    assert "\u202e" not in error


def test_errors_that_have_no_name_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.cli.main import main

    def broken() -> None:
        raise ZeroDivisionError

    app.command("broken")(broken)
    try:
        monkeypatch.setattr(sys, "argv", ["posttrain", "broken"])
        with pytest.raises(ZeroDivisionError):
            main()
    finally:
        app.registered_commands.pop()


def test_rollouts_filters(posttrain: Command) -> None:
    def rows(*arguments: str) -> list[dict[str, Any]]:
        code, output, _ = posttrain("rollouts", "--json", "--limit", "0", *arguments)
        assert code == 0
        return rows_of(output)

    everything = rows()
    assert len(everything) == 4 * 24 + 3 * 24
    assert len(everything[0]["prompt_ids"]) == everything[0]["num_prompt_tokens"]
    assert everything[0]["breakdown"].keys() <= {"cases", "score"}
    chosen = rows("--domain", "logic", "--purpose", "eval", "--iteration", "2", "--min-reward", "1")
    expected = [
        row["rollout_id"]
        for row in everything
        if (row["domain"], row["purpose"], row["iteration"]) == ("logic", "eval", 2) and row["reward"] >= 1
    ]
    assert [row["rollout_id"] for row in chosen] == expected
    assert all("invalid" in row["flags"] for row in rows("--flag", "invalid"))
    assert len(rows("--flag", "invalid")) == sum("invalid" in row["flags"] for row in everything) > 0
    assert rows("--outcome", "truncated") == [row for row in everything if row["outcome"] == "truncated"]
    assert rows("--domain", "x' or '1'='1") == []
    rewards = [row["reward"] for row in rows("--sort", "reward", "--descending", "--max-reward", "1")]
    assert rewards == sorted(rewards, reverse=True)
    assert len(rewards) == len(everything)


def test_rollouts_table_has_a_row_a_line_and_no_escape_codes(posttrain: Command) -> None:
    code, output, _ = posttrain("rollouts", "--limit", "0")
    assert code == 0
    assert len(output.splitlines()) == 1 + 4 * 24 + 3 * 24
    assert "\\x1b[31mred\\u202e" in output
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert len(posttrain("rollouts")[1].splitlines()) == 21


def test_sql(posttrain: Command) -> None:
    query = "select domain, count(*) as n, sum(num_response_tokens) as t from rollouts group by all order by all"
    table_lines = posttrain("sql", query)[1].splitlines()
    assert table_lines[0].split() == ["domain", "n", "t"]
    rows = rows_of(posttrain("sql", query, "--json")[1])
    assert [row["domain"] for row in rows] == ["logic", "program"]
    assert all(isinstance(row["t"], int) for row in rows)
    assert [line.split()[1:] for line in table_lines[1:]] == [[str(row["n"]), str(row["t"])] for row in rows]


def test_show(posttrain: Command) -> None:
    text = posttrain("show", "i00001.p0001.r01", "--run", "r")[1]
    assert text.startswith("rollout i00001.p0001.r01\n")
    record = json.loads(posttrain("show", "i00001.p0001.r01", "--json")[1])
    assert record["rollouts"]["rollout_id"] == "i00001.p0001.r01"


def test_report(posttrain: Command, tmp_path: Path) -> None:
    code, output, _ = posttrain("report", "r", "--png", "curve.png")
    assert code == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for part in ("training reward", "held-out pass rate (logic)", "paired over 6 problems", "chart: curve.png"):
        assert part in output
    found = json.loads(posttrain("report", "--json")[1])
    assert len(found["iterations"]) == 4
    assert found["comparisons"][0]["num_problems"] == 6


class ForgetfulStore(MemoryStore):
    """A server that ignores If-None-Match."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


class StaleStore(MemoryStore):
    """A server that ignores If-Match."""

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        self.put(key, data)
        info = self.stat(key)
        return info.etag if info else None


class RacyStore(MemoryStore):
    """A server that looks first and writes later: right for one writer, wrong for several."""

    def __init__(self) -> None:
        super().__init__()
        self._all_have_looked = threading.Barrier(8)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        found = self.stat(key)
        if key.endswith("/race"):
            self._all_have_looked.wait(10)
        if found is None:
            self.put(key, data)
        return found is None


def test_doctor_tries_conditional_writes(tmp_path: Path) -> None:
    memory, local = MemoryStore(), LocalStore(tmp_path / "store")
    for store in (memory, local):
        check_conditional_writes(store, 8)
        assert list(store.list("")) == []
    for broken in (ForgetfulStore(), StaleStore(), RacyStore()):
        with pytest.raises(StoreError, match="conditional writes do not work"):
            check_conditional_writes(broken, 8)
        assert list(broken.list("")) == []


def test_doctor_fails_when_something_required_is_broken(posttrain: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output, _ = posttrain("doctor", "--json", "--store", str(tmp_path / "file"))
    found = {finding["name"]: finding for finding in json.loads(output)}
    assert code == 1
    assert found["store"]["condition"] == "broken"
    assert found["disk"]["condition"] == "ok"
    assert found["vllm"]["condition"] in ("ok", "absent")
    assert found["torch"]["detail"].startswith(found["torch"]["facts"]["version"])


def test_tables_fit_the_width() -> None:
    lines = table(("id", "text"), [("a", "x" * 100), ("bb", None), ("c", "\x1b")], width=40)
    assert max(map(len, lines)) == 40
    assert lines[1].endswith("…")
    assert lines[2] == "bb"
    assert lines[3] == "c   \\x1b"
    assert table((), []) == []
    assert table(("n",), [(5,), (10,)])[1:] == [" 5", "10"]


def test_what_json_cannot_hold_is_made_plain() -> None:
    from datetime import date
    from decimal import Decimal

    value = {
        "a": Decimal("5"),
        "b": Decimal("0.5"),
        "c": float("nan"),
        "d": b"\x01",
        "e": [date(2030, 1, 2)],
        "f": None,
    }
    assert plain(value) == {"a": 5, "b": 0.5, "c": None, "d": "01", "e": ["2030-01-02"], "f": None}


def test_resume_goes_on_with_the_run_it_is_given(posttrain: Command, tmp_path: Path, finished_run: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished_run, store)
    for changed in ("run=other", f"store={tmp_path / 'other'}"):
        code, _, said = posttrain("resume", "r", "--store", str(store), "--no-prefect", "--set", changed)
        assert code == 2
        assert "starts another run" in said
    (store / "runs/r").rename(store / "runs/renamed")
    code, _, said = posttrain("resume", "renamed", "--store", str(store), "--no-prefect")
    assert code == 2
    assert "record of run 'r'" in said
    assert not (tmp_path / "other").exists()
    assert [entry.name for entry in (store / "runs").iterdir()] == ["renamed"]


def test_a_deployment_needs_a_server(posttrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "none.toml"))
    (tmp_path / "run.yaml").write_text(scripted(tmp_path / "store").model_dump_json())
    code, _, said = posttrain("run", str(tmp_path / "run.yaml"), "--deployment", "train/default")
    assert code == 2
    assert "PREFECT_API_URL" in said
