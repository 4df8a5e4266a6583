"""The command in this process: (exit code, standard output, standard error)."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def posttrain(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Looks at the finished run unless told otherwise; works in a folder of its own."""
    monkeypatch.setenv("POSTTRAIN_STORE", str(finished_run))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return call
