"""What the Prefect UI is given about a run."""

from pathlib import Path

import pytest

from posttrain_core.inspect import Run as KnownRun
from posttrain_core.lease import Lease
from posttrain_core.stages.context import Run
from posttrain_core.store import open_store
from tasks.artifacts import VIEW_URL, iteration_markdown, view_line


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Run:
    store = open_store(str(finished_run))
    return Run(store, KnownRun(store, "r").config, Lease(store, "r"), tmp_path)


def test_every_table_says_how_to_look_at_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VIEW_URL, raising=False)
    found = iteration_markdown(run, 3)
    assert f"`posttrain view {run.store.url}`" in found
    assert "](" not in found
    assert "| reward_mean | 0.125 |" in found


def test_a_viewer_that_is_known_is_linked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VIEW_URL, "https://viewer.example.com:8700/")
    assert view_line(run).startswith(
        "[open in the viewer](https://viewer.example.com:8700/runs/r), or `posttrain view "
    )
