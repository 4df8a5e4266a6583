"""S3 and S3-compatible servers through boto3; `docs/s3.md` says how to point it at one.

Credentials, region, endpoint, certificates and addressing style come from the standard AWS chain. A conditional write
is a single PUT: some servers ignore the condition on multipart completions, copies and deletes. An unknown answer to
one (500, time-out, reset) is settled by reading the key. Parts are for large files whose key only one attempt writes.
"""

import base64
import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from urllib.parse import urlparse

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
)
from botocore.parsers import ResponseParserError

from posttrain_core.errors import ConfigError, ObjectNotFound, StoreError, StoreFull
from posttrain_core.store.protocol import ObjectInfo, check_key, check_prefix

A = TypeVar("A")
T = TypeVar("T")

PART_BYTES = 16 << 20  # what is larger travels in parts of at least this size
_MAX_PARTS = 10_000  # of one upload; a limit of S3
_THREADS = 8  # parts under way at a time
_ATTEMPTS = 6
_FAULTS = (ClientError, BotoCoreError, ResponseParserError, ValueError, OSError)  # ValueError: a header broke off
_ABSENT = {"NoSuchKey", "404", "NotFound"}
_LOST = {"PreconditionFailed", "412"}
_PAST_END = {"InvalidRange", "416"}
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_SKEWED = "RequestTimeTooSkewed"
_TRANSIENT = {"RequestTimeout", "BadDigest", _SKEWED}  # 4xx that a second try may cure; so are 408, 409 and 429
_FULL = {"QuotaExceeded", "InsufficientStorage", "507"}
_REFUSED = {"AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}

for _name in ("boto3", "botocore"):  # below this they log signed headers and session tokens
    logging.getLogger(_name).setLevel(max(logging.WARNING, logging.getLogger(_name).level))


class S3Store:
    """One bucket and prefix. Safe for several threads. `sleep` is called between attempts."""

    def __init__(
        self, client: Any, bucket: str, prefix: str = "", sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._client, self._bucket = client, bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._random, self._sleep = Random(), sleep

    @classmethod
    def from_url(cls, url: str) -> "S3Store":
        """Of `s3://bucket/prefix`. ConfigError for another URL or for settings that boto3 refuses."""
        parts = urlparse(url)
        if "@" in parts.netloc:  # not repeated in the message
            raise ConfigError("store: an s3:// URL holds no credentials; set AWS_ACCESS_KEY_ID or AWS_PROFILE")
        if not parts.netloc or parts.query or parts.fragment:
            raise ConfigError(
                f"store: {url!r} is not s3://bucket/prefix; endpoint, region and credentials are set as for "
                "the AWS CLI (AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE), see docs/s3.md"
            )
        prefix = parts.path.strip("/")
        return cls(connect(url), parts.netloc, check_key(prefix) if prefix else "")

    def get(self, key: str) -> bytes:
        return self._fetch(key)[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        return self._read(key, start, length)[0]

    def put(self, key: str, data: bytes) -> None:
        self._try("put", key, lambda: self._write(key, data))

    put_volatile = put

    def put_file(self, key: str, path: Path) -> None:
        self._try("put", key, lambda: self._upload(key, path))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._conditional(key, data, {"IfNoneMatch": "*"}) is not None

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        return self._conditional(key, data, {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag})

    def get_file(self, key: str, path: Path) -> None:
        def download() -> None:
            with path.open("wb") as file:
                self._download(key, partial(_write_at, file.fileno()))

        self._try("get", key, download)

    def local_path(self, key: str) -> Path | None:
        return None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        token: str | None = None
        check_prefix(prefix)
        while True:
            page = self._try("list", prefix, partial(self._page, prefix, after, token))
            for item in page.get("Contents", ()):
                key, modified = item["Key"].removeprefix(self._prefix), item["LastModified"].timestamp()
                yield ObjectInfo(key, item["Size"], item["ETag"].strip('"'), modified)
            if not page["IsTruncated"]:
                return
            token = page["NextContinuationToken"]

    def stat(self, key: str) -> ObjectInfo | None:
        def call() -> ObjectInfo:
            head = _whole(self._client.head_object(**self._at(key)), "ContentLength", "ETag", "LastModified")
            return ObjectInfo(key, head["ContentLength"], head["ETag"].strip('"'), head["LastModified"].timestamp())

        try:
            return self._try("stat", key, call)
        except ObjectNotFound:
            return None

    def delete(self, key: str) -> None:
        with suppress(ObjectNotFound):
            self._try("delete", key, lambda: self._client.delete_object(**self._at(key)))

    # --- requests ---

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _page(self, prefix: str, after: str, token: str | None) -> Any:
        position = {"ContinuationToken": token} if token else {"StartAfter": self._prefix + after} if after else {}
        page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix + prefix, **position)
        return _whole(page, "IsTruncated", *(["NextContinuationToken"] if page.get("IsTruncated") else []))

    def _write(self, key: str, data: bytes, **condition: str) -> str:
        """One PUT; the server compares the bytes with their MD5. The etag without its quotes: radosgw wants it so."""
        answer = self._client.put_object(**self._at(key), Body=data, ContentMD5=_md5(data), **condition)
        return str(_whole(answer, "ETag")["ETag"]).strip('"')

    def _read(self, key: str, start: int, length: int, **condition: str) -> tuple[bytes, int, str]:
        """The bytes of a range, empty past the end; the object's size and etag. A negative start is from the end."""
        span = f"bytes={start}-{start + length - 1}" if start >= 0 else f"bytes={start}"

        def call() -> tuple[bytes, int, str]:
            try:
                answer = self._client.get_object(**self._at(key), Range=span, **condition)
            except ClientError as error:
                if _code(error) in _PAST_END:
                    return b"", 0, ""
                raise
            with closing(answer["Body"]) as body:  # as a context manager it gives urllib3's stream, and its errors
                data: bytes = body.read()
            etag = _whole(answer, "ETag")["ETag"].strip('"')
            if span_read := _RANGE.fullmatch(answer.get("ContentRange", "")):
                first, last, size = map(int, span_read.groups())
                skip = 0
            elif answer["ResponseMetadata"]["HTTPStatusCode"] == 200:  # the server leaves ranges alone
                size = _whole(answer, "ContentLength")["ContentLength"]
                first, last, skip = 0, size - 1, start
            else:
                raise ResponseParserError("a part of an object without Content-Range")
            if len(data) != last - first + 1:
                raise ResponseParserError(f"{len(data)} bytes instead of {last - first + 1}")
            return data[skip:][:length], size, etag

        return self._try("get", key, call)

    def _fetch(self, key: str) -> tuple[bytes, str]:
        """An object's bytes and the etag that belongs to them."""
        parts: dict[int, bytes] = {}
        etag = self._download(key, parts.__setitem__)
        return b"".join(parts[start] for start in sorted(parts)), etag

    def _download(self, key: str, take: Callable[[int, bytes], object]) -> str:
        """Hand over the object's bytes with their offsets, from several threads when it is large. Returns its etag."""
        first, size, etag = self._read(key, 0, PART_BYTES)
        take(0, first)

        def fetch(start: int) -> None:
            take(start, self._read(key, start, PART_BYTES, IfMatch=etag)[0])

        _in_parallel(fetch, range(len(first), size, PART_BYTES))
        return etag

    def _upload(self, key: str, path: Path) -> None:
        size = path.stat().st_size
        if size <= PART_BYTES:
            self._write(key, path.read_bytes())
            return
        step = max(PART_BYTES, -(-size // _MAX_PARTS))
        create = partial(self._client.create_multipart_upload, **self._at(key))
        upload = self._try("put", key, lambda: _whole(create(), "UploadId"))["UploadId"]

        def send(start: int) -> dict[str, Any]:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read(step)
            number = start // step + 1
            part = {"UploadId": upload, "PartNumber": number, "Body": data, "ContentMD5": _md5(data)}
            answer = self._try("put", key, lambda: _whole(self._client.upload_part(**self._at(key), **part), "ETag"))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            self._complete(key, size, upload, _in_parallel(send, range(0, size, step)))
        except BaseException:
            with suppress(*_FAULTS):  # else a lifecycle rule of the bucket has to
                self._client.abort_multipart_upload(**self._at(key), UploadId=upload)
            raise

    def _complete(self, key: str, size: int, upload: str, parts: Sequence[dict[str, Any]]) -> None:
        """An upload that is gone when it is completed again was completed before: only this attempt writes the key."""
        complete = partial(self._client.complete_multipart_upload, **self._at(key), UploadId=upload)
        try:
            self._try("put", key, lambda: complete(MultipartUpload={"Parts": parts}))
        except StoreError as error:
            if _code(error.__cause__) != "NoSuchUpload":
                raise
        found = self.stat(key)
        if found is None or found.num_bytes != size:
            raise StoreError(f"{key!r} in store {self.url} is not there whole after its upload. Resume the run")

    # --- faults ---

    def _conditional(self, key: str, data: bytes, condition: dict[str, str]) -> str | None:
        """The new etag, or None when the condition did not hold.

        An answer other than yes or no leaves open whether the write was applied. Then the key is read: our own bytes
        mean that it was; the state of before means that it was not, and it is tried again; anything else has won.
        """
        cause: Exception | None = None
        lost = _LOST | _ABSENT if "IfMatch" in condition else _LOST
        for attempt in range(_ATTEMPTS):
            try:
                return self._write(key, data, **condition)
            except _FAULTS as error:
                cause = error
            if attempt == 0 and _code(cause) in lost:
                return None
            if _final(cause) and _code(cause) not in lost:
                break
            self._pause(attempt)
            try:
                found, etag = self._fetch(key)
            except ObjectNotFound:
                found, etag = None, None
            if found == data:
                return etag
            if etag != condition.get("IfMatch"):
                return None
        raise self._failure("conditionally write", key, cause)

    def _try(self, operation: str, key: str, call: Callable[[], T]) -> T:
        cause: Exception | None = None
        for attempt in range(_ATTEMPTS):
            try:
                return call()
            except _FAULTS as error:
                cause = error
            if _code(cause) in _ABSENT:
                raise ObjectNotFound(f"no object {key!r} in store {self.url}") from cause
            if _final(cause):
                break
            self._pause(attempt)
        raise self._failure(operation, key, cause)

    def _pause(self, attempt: int) -> None:
        if attempt < _ATTEMPTS - 1:
            self._sleep(self._random.uniform(0.5, 1.0) * min(8.0, 0.2 * 2**attempt))

    def _failure(self, operation: str, key: str, cause: Exception | None) -> StoreError:
        full = _code(cause) in _FULL or (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))
        kind = StoreFull if full else StoreError
        tries = "" if cause is None or _final(cause) else f" ({_ATTEMPTS} attempts)"
        error = kind(f"cannot {operation} {key!r} in store {self.url}: {cause}{tries}. {_advice(cause)}")
        error.__cause__ = cause
        return error


def connect(url: str) -> Any:
    """A client. Path style is what every server knows; a profile's own `addressing_style` stands above it."""
    try:
        session = botocore.session.Session()
        style = session.get_scoped_config().get("s3", {}).get("addressing_style", "path")
        config = Config(
            retries={"total_max_attempts": 1},  # ours: a retried conditional write must be settled by reading
            connect_timeout=5,
            read_timeout=20,  # below the lease's time to live, so that one lost packet does not cost the lease
            max_pool_connections=64,
            request_checksum_calculation="when_required",  # trailing checksums are a 411 for some servers over TLS
            response_checksum_validation="when_required",
            s3={"addressing_style": style},
        )
        client = boto3.session.Session(botocore_session=session).client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"store: no S3 client for {url}: {error}") from error
    if "@" in urlparse(client.meta.endpoint_url).netloc:
        raise ConfigError(
            "store: the S3 endpoint's URL holds credentials; set AWS_ACCESS_KEY_ID or AWS_PROFILE instead"
        )
    return client


def _in_parallel(call: Callable[[A], T], items: Iterable[A]) -> list[T]:
    """The results in order. After a failure nothing more is begun."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="s3") as pool:
        pending = [pool.submit(call, item) for item in items]
        try:
            return [one.result() for one in pending]
        finally:
            for one in pending:
                one.cancel()


def _whole(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    """The answer itself; a fault when a connection that broke among the headers left some out."""
    if missing := [name for name in names if name not in answer]:
        raise ResponseParserError(f"an answer without {', '.join(missing)}")
    etag = answer.get("ETag", "")
    if etag.startswith('"') and not (len(etag) > 1 and etag.endswith('"')):
        raise ResponseParserError(f"an etag that broke off: {etag}")
    return answer


def _write_at(descriptor: int, start: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        start, view = start + written, view[written:]


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _code(error: BaseException | None) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def _final(error: Exception) -> bool:
    """Whether trying again cannot help: the server refused, no credentials, or a fault of this machine's files."""
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        refused = (300 <= status < 500 and status not in (408, 409, 429)) or status == 501
        return (refused and _code(error) not in _TRANSIENT) or _code(error) in _FULL
    if isinstance(error, BotoCoreError):  # some of them are an OSError too
        return isinstance(error, NoCredentialsError | PartialCredentialsError | ParamValidationError)
    return isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError)


def _advice(error: Exception | None) -> str:
    """What the user can do about it."""
    code = _code(error)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run under a role"
    if code in _REFUSED:
        return "Check the credentials (aws sts get-caller-identity) and their rights to the bucket (docs/s3.md)"
    if code == "NoSuchBucket":
        return "Make the bucket, or correct the store's URL"
    if code == _SKEWED:
        return f"Set this machine's clock ({_skew(error)}), then resume the run"
    if code in _FULL or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return "Free some space, then resume the run"
    if isinstance(error, SSLError):
        return "Check AWS_CA_BUNDLE and AWS_ENDPOINT_URL_S3"
    if isinstance(error, EndpointConnectionError):
        return "Check the network and AWS_ENDPOINT_URL_S3, then resume the run"
    if code in ("NotImplemented", "501"):
        return "The server lacks what posttrain needs (docs/s3.md): use another one"
    if error is not None and _final(error):
        return "Correct what the server says, then resume the run"
    return "Resume the run when the server answers again; fewer workers (prefect.max_workers) ask less of it"


def _skew(error: Exception | None) -> str:
    """How far this machine's clock is off, by the server's Date."""
    headers = error.response["ResponseMetadata"].get("HTTPHeaders", {}) if isinstance(error, ClientError) else {}
    try:
        seconds = (datetime.now(UTC) - parsedate_to_datetime(str(headers["date"]))).total_seconds()
    except (KeyError, ValueError, TypeError):
        return "by how much it is off the server did not say"
    return f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the server's"
