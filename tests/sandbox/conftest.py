"""One sandbox per way of isolating that this machine offers."""

import os
from collections.abc import Iterator

import pytest

from posttrain_core.errors import SandboxUnavailable
from posttrain_core.sandbox.embedded import MODES, ZygotePool


@pytest.fixture(scope="session", params=MODES if os.geteuid() == 0 else MODES[1:])
def sandbox(request: pytest.FixtureRequest) -> Iterator[ZygotePool]:
    """Root tests both ways, an ordinary user the one that needs no root."""
    try:
        pool = ZygotePool((request.param,), workers=2)
    except SandboxUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    yield pool
    pool.close()
