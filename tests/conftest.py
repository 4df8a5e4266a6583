"""What several folders of tests ask for: S3 servers on this machine with made-up credentials, and a finished run.

moto answers at once and serves quick tests; radosgw is a real server, which decides races and has faults of its own.
"""

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import radosgw

BUCKET = "bucket"
_prefixes = itertools.count()

# Started in the background, a process inherits that SIGINT is ignored, and so would everything that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def s3_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables that point the standard AWS chain at a running server and at nothing else."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    nowhere = tmp_path_factory.mktemp("aws") / "none"
    yield {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test-access",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(nowhere),
        "AWS_SHARED_CREDENTIALS_FILE": str(nowhere),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server.stop()


@pytest.fixture(scope="session")
def rados_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The same for a real server, one for each process of tests. Where it is not installed, only CI insists on it."""
    if why := radosgw.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"radosgw: {why}")
    with radosgw.running(tmp_path_factory.mktemp("radosgw")) as environment:
        yield environment


def _client(environment: dict[str, str]) -> Iterator[Any]:
    """Our client of a server, and the bucket made."""
    from posttrain_core.store.s3 import connect

    with pytest.MonkeyPatch.context() as patch:
        _set(environment, patch)
        client = connect(f"s3://{BUCKET}")
        client.create_bucket(Bucket=BUCKET)
    yield client
    client.close()


def _set(environment: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    """Nothing else of the AWS chain, whatever this machine has."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    for name, value in environment.items():
        patch.setenv(name, value)


@pytest.fixture(scope="session")
def s3_client(s3_environment: dict[str, str]) -> Iterator[Any]:
    yield from _client(s3_environment)


@pytest.fixture(scope="session")
def rados_client(rados_environment: dict[str, str]) -> Iterator[Any]:
    yield from _client(rados_environment)


@pytest.fixture
def s3_url(s3_client: Any, s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own, with the environment set for it."""
    _set(s3_environment, monkeypatch)
    return f"s3://{BUCKET}/prefix{next(_prefixes)}"


@pytest.fixture
def rados_url(rados_client: Any, rados_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The same on the real server."""
    _set(rados_environment, monkeypatch)
    return f"s3://{BUCKET}/prefix{next(_prefixes)}"


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the run "r": 4 iterations of two domains, evaluations of versions 0, 2 and 4. Not to be written."""
    from tests.crash import driver
    from tests.crash.test_kills import scripted

    store = tmp_path_factory.mktemp("finished")
    config = scripted(
        store,
        domains={
            "program": {"type": "program"},
            "logic": {"type": "reasoning_gym", "generator": "syllogism", "num_problems": 30},
        },
        sampler={"type": "scripted", "responses": ["Yes", "No", "x+1", "\x1b[31mred\u202e", ""]},
        eval={"every": 2, "num_problems": 6, "samples_per_problem": 4},
        learner={"type": "numpy", "learning_rate": 2.0},
    )
    driver.main(config.model_dump_json())
    return store
