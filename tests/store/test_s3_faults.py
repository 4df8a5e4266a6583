"""The S3 store over a client whose answers are chosen: what is tried again, settled by reading, or final."""

import io
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError

from posttrain_core.errors import ConfigError, ObjectNotFound, StoreError, StoreFull
from posttrain_core.store.factory import open_store
from posttrain_core.store.s3 import S3Store


def refusal(code: str, status: int) -> ClientError:
    answer = {"Error": {"Code": code, "Message": f"said {code}"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "Operation")  # type: ignore[arg-type]


INTERNAL, SLOW = refusal("InternalError", 500), refusal("SlowDown", 503)
TIMEOUT = ReadTimeoutError(endpoint_url="http://s3")
UNREACHABLE = EndpointConnectionError(endpoint_url="http://s3")
TRANSIENT = [INTERNAL, SLOW, TIMEOUT, UNREACHABLE, refusal("RequestTimeout", 400), refusal("Conflict", 409)]


class FakeS3:
    """One bucket in memory. The next answers come from `faults`: an error, raised before the call or after it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: list[tuple[Exception | None, str]] = []
        self.calls: Counter[str] = Counter()

    def fail(self, *errors: Exception, when: str = "before") -> None:
        self.faults += [(error, when) for error in errors]

    def put_object(self, Key: str, Body: io.BytesIO, IfNoneMatch: str = "", IfMatch: str = "", **_: Any) -> Any:
        self.calls["put"] += 1
        error, when = self.faults.pop(0) if self.faults else (None, "")
        if error and when == "before":
            raise error
        found = self.objects.get(Key)
        if (IfNoneMatch and found is not None) or (IfMatch and (found is None or tag(found) != IfMatch)):
            raise refusal("PreconditionFailed", 412)
        self.objects[Key] = Body.read()
        if error:
            raise error
        return {"ETag": f'"{tag(self.objects[Key])}"'}

    def get_object(self, Key: str, **_: Any) -> Any:
        self.calls["get"] += 1
        self._maybe_fail()
        if Key not in self.objects:
            raise refusal("NoSuchKey", 404)
        return {"Body": io.BytesIO(self.objects[Key])}

    def head_object(self, Key: str, **_: Any) -> Any:
        if Key not in self.objects:
            raise refusal("404", 404)
        return {"ContentLength": len(self.objects[Key]), "ETag": f'"{tag(self.objects[Key])}"'}

    def upload_fileobj(self, file: io.BytesIO, bucket: str, key: str) -> None:
        self._maybe_fail()
        self.objects[key] = file.read()

    def _maybe_fail(self) -> None:
        if self.faults:
            raise self.faults.pop(0)[0]  # type: ignore[misc]


def tag(data: bytes) -> str:
    return f"etag of {data!r}"


@pytest.fixture
def server() -> FakeS3:
    return FakeS3()


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def store(server: FakeS3, waits: list[float]) -> S3Store:
    return S3Store(server, "bucket", sleep=waits.append)


@pytest.mark.parametrize("error", TRANSIENT, ids=str)
def test_transient_faults_are_tried_again(
    error: Exception, store: S3Store, server: FakeS3, waits: list[float], tmp_path: Path
) -> None:
    server.fail(error, error)
    store.put("key", b"x")
    server.fail(error, error)
    assert store.get("key") == b"x"
    (tmp_path / "file").write_bytes(b"whole")
    server.fail(error, error)
    store.put_file("file", tmp_path / "file")
    assert server.objects["file"] == b"whole"
    assert len(waits) == 6


def test_persistent_faults_end_with_the_key_the_operation_and_the_cause(
    store: S3Store, server: FakeS3, waits: list[float]
) -> None:
    server.fail(*[SLOW] * 50)
    with pytest.raises(StoreError, match=r"cannot get 'some/key' in store s3://bucket: .*SlowDown") as caught:
        store.get("some/key")
    assert caught.value.retryable
    assert server.calls["get"] == len(waits) + 1 == 6
    assert all(later > earlier / 2 for earlier, later in pairwise(waits))


@pytest.mark.parametrize("error", TRANSIENT, ids=str)
def test_a_write_whose_answer_was_lost_is_settled_by_reading(error: Exception, store: S3Store, server: FakeS3) -> None:
    server.fail(error, when="after")
    assert store.put_if_absent("key", b"mine") is True
    assert server.calls["put"] == 1
    server.fail(error, when="after")
    assert store.put_if_match("key", b"next", tag(b"mine")) == tag(b"next")
    assert server.calls["put"] == 2


@pytest.mark.parametrize("error", TRANSIENT, ids=str)
def test_a_write_that_was_not_applied_is_tried_again(error: Exception, store: S3Store, server: FakeS3) -> None:
    server.fail(error, error)
    assert store.put_if_absent("key", b"mine") is True
    assert server.objects["key"] == b"mine"
    server.fail(error)
    assert store.put_if_match("key", b"next", tag(b"mine")) == tag(b"next")
    assert server.objects["key"] == b"next"
    assert server.calls["put"] == 5


def test_a_write_that_another_overtook_while_its_answer_was_lost_has_lost(store: S3Store, server: FakeS3) -> None:
    server.objects["key"] = b"theirs"
    server.fail(INTERNAL)
    assert store.put_if_absent("key", b"mine") is False
    server.fail(TIMEOUT)
    assert store.put_if_match("key", b"mine", tag(b"before")) is None
    assert server.objects["key"] == b"theirs"


def test_a_second_try_that_meets_its_own_first_one_has_won(store: S3Store, server: FakeS3) -> None:
    """The first is applied only after the key was read: the second then fails its condition."""
    server.fail(INTERNAL)
    head, heads = server.head_object, []

    def late(Key: str, **rest: Any) -> Any:
        heads.append(Key)
        if len(heads) == 1:
            try:
                return head(Key, **rest)
            finally:
                server.objects[Key] = b"mine"
        return head(Key, **rest)

    server.head_object = late  # type: ignore[method-assign]
    assert store.put_if_absent("key", b"mine") is True
    assert server.calls["put"] == 2


def test_a_plain_refusal_is_a_lost_race_at_once(store: S3Store, server: FakeS3, waits: list[float]) -> None:
    server.objects["key"] = b"theirs"
    assert store.put_if_absent("key", b"mine") is False
    assert store.put_if_match("key", b"mine", tag(b"stale")) is None
    server.fail(refusal("NoSuchKey", 404))
    assert store.put_if_match("gone", b"mine", tag(b"stale")) is None
    assert (server.calls["put"], server.calls["get"], waits) == (3, 0, [])


@pytest.mark.parametrize(
    "error",
    [
        refusal("AccessDenied", 403),
        refusal("403", 403),
        refusal("ExpiredToken", 400),
        refusal("NoSuchBucket", 404),
        NoCredentialsError(),
    ],
    ids=str,
)
def test_refusals_are_final(error: Exception, store: S3Store, server: FakeS3, waits: list[float]) -> None:
    for call in (
        lambda: store.get("key"),
        lambda: store.put("key", b"x"),
        lambda: store.put_if_absent("key", b"x"),
        lambda: store.put_if_match("key", b"x", "etag"),
    ):
        server.fail(error)
        with pytest.raises(StoreError, match=r"'key' in store s3://bucket: ") as caught:
            call()
        assert not isinstance(caught.value, ObjectNotFound)
        assert caught.value.__cause__ is error
    assert waits == []


def test_a_quota_is_a_full_store(store: S3Store, server: FakeS3, tmp_path: Path) -> None:
    for error in (refusal("QuotaExceeded", 403), refusal("InsufficientStorage", 507)):
        server.fail(error)
        with pytest.raises(StoreFull, match="'key'"):
            store.put_if_absent("key", b"x")
    assert not server.objects


def test_errors_of_a_real_server_hold_no_credentials(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAVISIBLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    store = open_store("s3://no-such-bucket/prefix")
    with pytest.raises(
        StoreError, match=r"cannot put 'key' in store s3://no-such-bucket/prefix: .*NoSuchBucket"
    ) as one:
        store.put("key", b"x")
    with pytest.raises(StoreError) as two:
        store.put_if_absent("key", b"x")
    for text in (str(one.value), str(two.value)):
        assert "VISIBLE" not in text
        assert "secret" not in text


def test_a_url_without_a_bucket_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        open_store("s3:///prefix")
