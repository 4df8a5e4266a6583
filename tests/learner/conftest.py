from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.learner.llama import write_llama
from tests.learner.rank_group import Ranks, started


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with started(1, tmp_path_factory.mktemp("one")) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with started(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks
