"""The command in this process: (exit code, standard output, standard error)."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli.main import main

Command = Callable[..., tuple[int, str, str]]


def make_command(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Looks at `store` unless told otherwise; works in `folder`."""
    monkeypatch.setenv("POSTTRAIN_STORE", str(store))
    monkeypatch.chdir(folder)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return call
