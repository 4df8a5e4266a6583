"""Aliases of policies at the command line."""

import json
from pathlib import Path

from tests.cli.conftest import Command


def test_an_alias_is_moved_and_listed(posttrain: Command, finished_run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "runs").mkdir(parents=True)
    (store / "runs/r").symlink_to(finished_run / "runs/r")
    at = ("--store", str(store))
    assert posttrain("alias", "math", *at) == (0, f"no alias of 'math' in {store}\n", "")
    for version in ("0", "4"):
        code, _, error = posttrain("alias", "math", "best", "--version", version, "--run", "r", *at)
        assert (code, error) == (0, "")
    moves = json.loads(posttrain("alias", "math", "--json", *at)[1])
    assert [(move["alias"], move["run"], move["version"]) for move in moves] == [("best", "r", 0), ("best", "r", 4)]
    assert "best" in posttrain("alias", "math", *at)[1]


def test_an_alias_of_nothing_is_refused(posttrain: Command, finished_run: Path) -> None:
    code, _, error = posttrain("alias", "math", "best", "--version", "77", "--run", "r")
    assert code == 2
    assert "policy version 77 of run 'r'" in error
    assert "not published; possible: 0, 4" in error
    code, _, error = posttrain("alias", "math", "best")
    assert code == 2
    assert "--version" in error
    assert not (finished_run / "registry").exists()
