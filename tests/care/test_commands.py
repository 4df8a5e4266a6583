"""fsck, gc, fork and export as commands: output, JSON, exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain_core.store import open_store
from tests.care.test_fsck import TABLE
from tests.command import Command, make_command


@pytest.fixture
def store(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "store"))


@pytest.fixture
def posttrain(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    return make_command(store, tmp_path, monkeypatch, capsys)


def test_fsck(posttrain: Command, store: Path) -> None:
    code, output, _ = posttrain("fsck", "r")
    assert code == 0
    assert output.startswith("run r: clean (")
    (store / TABLE).unlink()
    code, output, _ = posttrain("fsck")
    assert code == 5
    assert "run r: 1 findings" in output
    assert f"{TABLE}: it is gone, but a manifest names it" in output
    code, output, _ = posttrain("fsck", "--all", "--json")
    assert code == 5
    (found,) = json.loads(output)
    assert [finding["key"] for finding in found["findings"]] == [TABLE]
    assert posttrain("fsck", "other")[0] == 2
    assert posttrain("fsck", "r", "--all")[0] == 2


def test_gc(posttrain: Command, store: Path) -> None:
    assert posttrain("gc")[1] == "0 objects, 0 bytes could go\n"
    left = store / "runs/r/policies/version=00004/attempt=x/model.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"123")
    assert posttrain("gc")[1] == "0 objects, 0 bytes could go\n", "it is young"
    code, output, _ = posttrain("gc", "--grace", "0", "--keys")
    assert (code, output.splitlines()[-1]) == (0, "1 objects, 3 bytes could go; --delete removes them")
    assert "attempts at weights that another attempt won" in output
    assert left.relative_to(store).as_posix() in output
    found = json.loads(posttrain("gc", "--grace", "0", "--json")[1])
    assert (found["deleted"], found["num_bytes"], found["objects"][0]["run"]) == (False, 3, "r")
    assert posttrain("gc", "--grace", "0", "--delete")[1].splitlines()[-1] == "deleted 1 objects, 3 bytes"
    assert not left.exists()


def test_fork(posttrain: Command, store: Path) -> None:
    code, output, _ = posttrain("fork", "r", "--at", "4", "--as", "f", "--set", "learner.learning_rate=0.25")
    assert code == 0, output
    assert "other settings from iteration 4 on: learner.learning_rate" in output
    assert "the learner begins with the checkpoint of 3" in output
    assert "posttrain resume f --store" in output
    assert json.loads(open_store(str(store)).get("runs/f/run.json"))["config"]["learner"]["learning_rate"] == 0.25
    assert posttrain("fsck", "--all")[0] == 0
    for arguments, code, words in (
        (("--at", "4", "--as", "f"), 3, "exists"),
        (("--at", "3", "--as", "g"), 2, "version 3 was retired (checkpoint.keep_last, keep_every); possible: 0, 4"),
        (("--at", "4", "--as", "g", "--set", "seed=3"), 2, "a fork cannot change seed"),
        (("--at", "4", "--as", "g", "--set", "run=h"), 2, "leave run and store out"),
    ):
        found = posttrain("fork", "r", *arguments)
        assert found[0] == code
        assert words in found[2]


def test_export(posttrain: Command, tmp_path: Path) -> None:
    assert posttrain("export", "dataset", "r", "--to", "d")[1] == "d: 96 rollouts in train, 72 rollouts in held_out\n"
    code, output, _ = posttrain("export", "sft", "r", "--to", "x.jsonl", "--min-reward", "0.5", "--best-of-group")
    assert (code, output) == (0, f"x.jsonl: {len(Path('x.jsonl').read_text().splitlines())} examples\n")
    assert posttrain("export", "policy", "r", "--to", "p")[1].startswith("p: policy version 4, 1 files, ")
    code, _, error = posttrain("export", "policy", "r", "--to", "p")
    assert code == 2
    assert "exists and is not overwritten" in error


def test_they_import_nothing_heavy(finished_run: Path) -> None:
    code = """
import sys
from flows.cli.main import main
for arguments in (["fsck", "r"], ["gc"], ["export", "--help"]):
    sys.argv = ["posttrain", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, arguments
print(*sorted({"torch", "prefect", "deepspeed", "transformers", "boto3", "duckdb"} & sys.modules.keys()))
"""
    environment = {"POSTTRAIN_STORE": str(finished_run), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


def test_delete(posttrain: Command, store: Path) -> None:
    assert posttrain("fork", "r", "--at", "4", "--as", "f")[0] == 0
    assert "posttrain gc --delete" in posttrain("delete", "r")[1]
    assert posttrain("status", "r")[0] == 2
    assert "run r" not in posttrain("fsck", "--all")[1]
    assert posttrain("gc", "--grace", "0", "--delete")[0] == 0
    assert posttrain("fsck", "--all")[1].startswith("run f: clean")
    assert posttrain("delete", "other")[0] == 2
