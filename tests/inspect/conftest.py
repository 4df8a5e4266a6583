import shutil
from pathlib import Path

import pytest

from posttrain_core.inspect import Run, open_run


@pytest.fixture(scope="session")
def run(finished_run: Path) -> Run:
    return open_run(str(finished_run), "r")


@pytest.fixture
def own_store(finished_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished_run, tmp_path / "store"))
