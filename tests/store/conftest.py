"""The stores that every contract test runs over."""

import uuid
from pathlib import Path

import pytest

from posttrain_core.store import ObjectStore, open_store
from posttrain_core.store.memory import MemoryStore
from posttrain_core.store.s3 import S3Store
from tests.conftest import BUCKET


def make_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if kind == "memory":
        return MemoryStore()
    if kind == "s3":
        return S3Store(request.getfixturevalue("s3_client"), BUCKET, uuid.uuid4().hex)
    return open_store(str(tmp_path / "made" / "by" / "the store"))


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return make_store(request.param, request, tmp_path)


@pytest.fixture(params=["local", "memory"])
def racing_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Not S3: the server of these tests does not decide races, a real one does."""
    return make_store(request.param, request, tmp_path)
