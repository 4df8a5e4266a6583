import shutil
import uuid
from pathlib import Path

import pytest

from posttrain_core.store import ObjectStore, open_store
from posttrain_core.store.memory import MemoryStore
from posttrain_core.store.s3 import S3Store
from tests.conftest import BUCKET


@pytest.fixture(params=["memory"])
def own_store(request: pytest.FixtureRequest, finished_run: Path, tmp_path: Path) -> ObjectStore:
    """A copy of the finished run that a test may damage; in memory unless it asks for others by `indirect`."""
    if request.param == "local":
        return open_store(str(shutil.copytree(finished_run, tmp_path / "store")))
    store: ObjectStore = MemoryStore()
    if request.param == "s3":
        store = S3Store(request.getfixturevalue("s3_client"), BUCKET, uuid.uuid4().hex)
    source = open_store(str(finished_run))
    for info in source.list(""):
        if not info.key.endswith("lease.json"):  # a lock here, a record there
            store.put(info.key, source.get(info.key))
    return store
