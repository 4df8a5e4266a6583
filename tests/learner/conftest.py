from pathlib import Path

import pytest

from tests.learner.llama import write_llama


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("policy"))
