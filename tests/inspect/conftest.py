import shutil
from pathlib import Path

import pytest

from flows.synthetic_run import Size, write_run
from posttrain_core.inspect import Run, open_run


@pytest.fixture(scope="session")
def run(finished_run: Path) -> Run:
    return open_run(str(finished_run), "r")


@pytest.fixture
def own_store(finished_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished_run, tmp_path / "store"))


@pytest.fixture(scope="session")
def made_up_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up runs, not to be written: "large" has objects of which parts are read; "short" and "long" have the same
    few rows in an iteration, and 12 and 20 iterations."""
    store = tmp_path_factory.mktemp("made-up")
    large = Size(iterations=4, rollouts=1024, rollouts_per_shard=512, eval_every=2, eval_rollouts=64, mean_tokens=64)
    write_run(str(store), "large", large, num_processes=1)
    for name, iterations in (("short", 12), ("long", 20)):
        size = Size(iterations=iterations, rollouts=8, eval_every=6, eval_rollouts=16, mean_tokens=4)
        write_run(str(store), name, size, num_processes=1)
    return store
