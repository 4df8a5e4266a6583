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
    if kind == "local":
        return open_store(str(tmp_path / "made" / "by" / "the store"))
    client = request.getfixturevalue({"moto": "s3_client", "radosgw": "rados_client"}[kind])
    return S3Store(client, BUCKET, uuid.uuid4().hex)


@pytest.fixture(params=["local", "memory", "moto", "radosgw"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return make_store(request.param, request, tmp_path)


@pytest.fixture(params=["local", "memory", "radosgw"])
def racing_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Not moto, which does not decide races."""
    return make_store(request.param, request, tmp_path)
