"""Scratch folders of killed processes go, those of others stay."""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flows.scratch import scratch_folder

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal
from flows.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def abandoned() -> Path:
    """The folder of a process that was killed."""
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, check=False)
    return Path(done.stdout.strip())


def test_those_of_killed_processes_go_and_those_of_live_ones_stay(shared: Path) -> None:
    left = abandoned()
    assert left.is_dir()
    with scratch_folder() as first, scratch_folder() as second:
        assert not left.exists()
        assert first.is_dir()
        assert {first, second} == set(shared.iterdir())
    assert not list(shared.iterdir())


def test_those_of_another_host_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pids say nothing here."""
    left = abandoned()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with scratch_folder():
        assert left.is_dir()
