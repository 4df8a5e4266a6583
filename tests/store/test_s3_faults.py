"""The S3 store over a client whose answers are chosen: what is tried again, settled by reading, or final."""

import hashlib
import io
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError

from posttrain_core.care.contents import Seen, look_at
from posttrain_core.errors import ObjectNotFound, StoreError, StoreFull
from posttrain_core.manifest import ObjectRef
from posttrain_core.store.s3 import PART_BYTES, S3Store


def refusal(code: str, status: int) -> ClientError:
    answer = {"Error": {"Code": code, "Message": f"said {code}"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "Operation")  # type: ignore[arg-type]


INTERNAL, SLOW = refusal("InternalError", 500), refusal("SlowDown", 503)
TIMEOUT = ReadTimeoutError(endpoint_url="http://s3")
UNREACHABLE = EndpointConnectionError(endpoint_url="http://s3")
TRANSIENT = [INTERNAL, SLOW, TIMEOUT, UNREACHABLE, refusal("RequestTimeout", 400), refusal("Conflict", 409)]
TRANSIENT += [refusal("BadDigest", 400), ValueError("of botocore's parser, about a header that broke off")]


class FakeS3:
    """One bucket in memory. The next answers come from `faults`: an error, raised before the call or after it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.faults: list[tuple[Exception | None, str]] = []
        self.calls: Counter[str] = Counter()
        self.knows_ranges = True

    def fail(self, *errors: Exception, when: str = "before") -> None:
        self.faults += [(error, when) for error in errors]

    def put_object(self, Key: str, Body: bytes, IfNoneMatch: str = "", IfMatch: str = "", **_: Any) -> Any:
        self.calls["put"] += 1
        error, when = self.faults.pop(0) if self.faults else (None, "")
        if error and when == "before":
            raise error
        found = self.objects.get(Key)
        if (IfNoneMatch and found is not None) or (IfMatch and (found is None or tag(found) != IfMatch)):
            raise refusal("PreconditionFailed", 412)
        self.objects[Key] = Body
        if error:
            raise error
        return {"ETag": f'"{tag(self.objects[Key])}"'}

    def get_object(self, Key: str, Range: str, IfMatch: str = "", **_: Any) -> Any:
        self.calls["get"] += 1
        self._maybe_fail()
        if Key not in self.objects:
            raise refusal("NoSuchKey", 404)
        data = self.objects[Key]
        if IfMatch and IfMatch != tag(data):
            raise refusal("PreconditionFailed", 412)
        if not self.knows_ranges:
            return {"Body": io.BytesIO(data), "ContentLength": len(data), "ETag": f'"{tag(data)}"'} | status(200)
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        if first >= len(data):
            raise refusal("InvalidRange", 416)
        last = min(last, len(data) - 1)
        body, span = io.BytesIO(data[first : last + 1]), f"bytes {first}-{last}/{len(data)}"
        found = {"Body": body, "ContentRange": span, "ContentLength": last + 1 - first, "ETag": f'"{tag(data)}"'}
        return found | status(206)

    def head_object(self, Key: str, **_: Any) -> Any:
        if Key not in self.objects:
            raise refusal("404", 404)
        now = datetime.now(UTC)
        return {
            "ContentLength": len(self.objects[Key]),
            "ETag": f'"{tag(self.objects[Key])}"',
            "LastModified": now,
        }

    def create_multipart_upload(self, Key: str, **_: Any) -> Any:
        self.uploads[f"upload of {Key}"] = {}
        return {"UploadId": f"upload of {Key}"}

    def upload_part(self, UploadId: str, PartNumber: int, Body: bytes, **_: Any) -> Any:
        self.calls["part"] += 1
        self._maybe_fail()
        self.uploads[UploadId][PartNumber] = Body
        return {"ETag": tag(Body)}

    def complete_multipart_upload(self, Key: str, UploadId: str, MultipartUpload: Any, **_: Any) -> Any:
        self.calls["complete"] += 1
        if UploadId not in self.uploads:
            raise refusal("NoSuchUpload", 404)
        parts = self.uploads.pop(UploadId)
        assert [part["ETag"] for part in MultipartUpload["Parts"]] == [tag(parts[n]) for n in sorted(parts)]
        self.objects[Key] = b"".join(parts[number] for number in sorted(parts))
        self._maybe_fail()

    def abort_multipart_upload(self, UploadId: str, **_: Any) -> None:
        del self.uploads[UploadId]

    def _maybe_fail(self) -> None:
        if self.faults:
            raise self.faults.pop(0)[0]  # type: ignore[misc]


def status(code: int) -> dict[str, Any]:
    return {"ResponseMetadata": {"HTTPStatusCode": code}}


def tag(data: bytes) -> str:
    return f"etag of {data[:20]!r}"


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
    server.fail(error, error)  # the second one meets the read
    assert store.put_if_absent("key", b"mine") is True
    assert server.objects["key"] == b"mine"
    server.fail(error)
    assert store.put_if_match("key", b"next", tag(b"mine")) == tag(b"next")
    assert server.objects["key"] == b"next"
    assert server.calls["put"] == 4


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
    get, gets = server.get_object, []

    def late(Key: str, **rest: Any) -> Any:
        gets.append(Key)
        if len(gets) == 1:
            try:
                return get(Key, **rest)
            finally:
                server.objects[Key] = b"mine"
        return get(Key, **rest)

    server.get_object = late  # type: ignore[method-assign]
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


# --- large files ---

LARGE = bytes(2 * PART_BYTES) + b"end"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "large").write_bytes(LARGE)
    return tmp_path / "large"


def test_a_part_is_tried_again_by_itself(store: S3Store, server: FakeS3, large: Path, tmp_path: Path) -> None:
    server.fail(SLOW, TIMEOUT)
    store.put_file("key", large)
    assert server.objects["key"] == LARGE
    assert server.calls["part"] == 3 + 2
    server.fail(SLOW, TIMEOUT)
    store.get_file("key", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == LARGE
    assert server.calls["get"] == 3 + 2
    assert store.get("key") == LARGE


@pytest.mark.parametrize("error", TRANSIENT, ids=str)
def test_a_completion_whose_answer_was_lost_is_settled_by_looking(
    error: Exception, store: S3Store, server: FakeS3, large: Path
) -> None:
    complete = server.complete_multipart_upload

    def lose_the_answer(**arguments: Any) -> None:
        if not server.calls["complete"]:
            server.fail(error)
        complete(**arguments)

    server.complete_multipart_upload = lose_the_answer  # type: ignore[method-assign]
    store.put_file("key", large)
    assert server.objects["key"] == LARGE
    assert server.calls["complete"] == 2


def test_an_upload_that_fails_leaves_nothing_behind(store: S3Store, server: FakeS3, large: Path) -> None:
    server.fail(*[SLOW] * 50)
    with pytest.raises(StoreError, match=r"cannot put 'key'.*SlowDown"):
        store.put_file("key", large)
    assert not server.objects
    assert not server.uploads


def test_an_object_that_changes_while_its_parts_are_read_is_an_error(store: S3Store, server: FakeS3) -> None:
    server.objects["key"] = LARGE
    get = server.get_object

    def change(**arguments: Any) -> Any:
        answer = get(**arguments)
        server.objects["key"] = b"other" + LARGE
        return answer

    server.get_object = change  # type: ignore[method-assign]
    with pytest.raises(StoreError, match=r"'key'.*PreconditionFailed"):
        store.get("key")


# --- answers that broke off among their headers, which http.client takes for whole ones ---


def without(method: Callable[..., Any], *names: str, times: int = 2) -> Callable[..., Any]:
    """The first answers of `method` without these fields and without a body."""
    left = [times]

    def call(**arguments: Any) -> Any:
        answer = method(**arguments)
        left[0] -= 1
        if left[0] < 0:
            return answer
        return {k: io.BytesIO() if k == "Body" else v for k, v in answer.items() if k not in names}

    return call


def test_half_an_answer_is_not_an_empty_object(store: S3Store, server: FakeS3) -> None:
    server.objects["key"] = b"whole"
    for names in (("ContentRange",), ("ETag",), ("ContentRange", "ETag", "ContentLength")):
        server.get_object = without(FakeS3.get_object.__get__(server), *names)  # type: ignore[method-assign]
        assert store.get("key") == b"whole"
        server.get_object = without(FakeS3.get_object.__get__(server), *names)  # type: ignore[method-assign]
        assert store.get_range("key", 1, 2) == b"ho"
    server.head_object = without(server.head_object, "ContentLength", "LastModified")  # type: ignore[method-assign]
    info = store.stat("key")
    assert info is not None
    assert info.num_bytes == 5


def test_a_part_that_lost_its_range_is_not_the_whole_object(store: S3Store, server: FakeS3) -> None:
    server.objects["key"] = LARGE
    get, answers = server.get_object, []

    def lose(**arguments: Any) -> Any:
        answers.append(get(**arguments))
        return {k: v for k, v in answers[-1].items() if k != "ContentRange" or len(answers) > 1}

    server.get_object = lose  # type: ignore[method-assign]
    assert store.get("key") == LARGE
    assert len(answers) == 4


def test_of_a_server_that_ignores_ranges_only_what_was_asked_for(store: S3Store, server: FakeS3) -> None:
    server.knows_ranges = False
    server.objects["key"] = LARGE
    assert store.get_range("key", len(LARGE) - 3, 2) == b"en"
    assert store.get_range("key", len(LARGE) - 3, 9) == b"end"
    assert store.get_range("key", -3, 2) == b"en"
    assert store.get_range("key", len(LARGE), 10) == b""
    assert store.get("key") == LARGE
    ref = ObjectRef("key", hashlib.sha256(LARGE).hexdigest(), len(LARGE))
    seen = look_at(store, ref, "r")
    assert isinstance(seen, Seen)
    assert (seen.digest, seen.num_bytes) == (ref.digest, ref.num_bytes)


def test_half_an_answer_to_a_write_is_an_unknown_one(store: S3Store, server: FakeS3) -> None:
    server.put_object = without(server.put_object, "ETag", times=1)  # type: ignore[method-assign]
    assert store.put_if_absent("key", b"mine") is True
    server.put_object = without(server.put_object, "ETag", times=1)  # type: ignore[method-assign]
    assert store.put_if_match("key", b"next", tag(b"mine")) == tag(b"next")


def test_half_a_listing_is_not_an_empty_store(store: S3Store, server: FakeS3) -> None:
    item = {"Key": "key", "Size": 1, "ETag": '"x"', "LastModified": datetime.now(UTC)}
    pages = iter([{}, {"IsTruncated": True}, {"IsTruncated": False, "Contents": [item]}])
    server.list_objects_v2 = lambda **_: next(pages)  # type: ignore[attr-defined]
    assert [info.key for info in store.list("")] == ["key"]


# --- words ---


def test_a_clock_that_is_off_is_named_with_the_difference(store: S3Store, server: FakeS3, waits: list[float]) -> None:
    error = refusal("RequestTimeTooSkewed", 403)
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=1000))
    error.response["ResponseMetadata"]["HTTPHeaders"] = {"date": date}
    server.fail(error)
    store.put("key", b"x")  # a clock that is being set right
    assert len(waits) == 1
    server.fail(*[error] * 6)
    with pytest.raises(StoreError, match=r"Set this machine's clock \((1000|999|1001) s behind the server's\)"):
        store.put("key", b"x")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (SLOW, r"\(6 attempts\)\. Resume the run when the server answers again; fewer workers"),
        (UNREACHABLE, "Check the network and AWS_ENDPOINT_URL_S3"),
        (refusal("AccessDenied", 403), "Check the credentials"),
        (refusal("NoSuchBucket", 404), "Make the bucket"),
        (refusal("NotImplemented", 501), "use another one"),
        (refusal("PermanentRedirect", 301), "Correct what the server says"),
        (NoCredentialsError(), "Set AWS_PROFILE"),
    ],
    ids=str,
)
def test_the_last_word_says_what_to_do(error: Exception, advice: str, store: S3Store, server: FakeS3) -> None:
    for call in (lambda: store.put("key", b"x"), lambda: store.put_if_absent("key", b"x")):
        server.faults = [(error, "before")] * 50
        with pytest.raises(StoreError, match=advice):
            call()
