"""The command over the finished run, in a folder of its own."""

from pathlib import Path

import pytest

from tests.command import Command, make_command

__all__ = ["Command"]


@pytest.fixture
def posttrain(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    return make_command(finished_run, tmp_path, monkeypatch, capsys)
