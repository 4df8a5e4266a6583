"""S3 and S3-compatible servers through boto3.

Credentials, region and endpoint come from the standard AWS chain (AWS_ENDPOINT_URL_S3 for other servers). A
conditional write is a single PUT: some servers ignore the condition on multipart completions, copies and deletes.
An unknown answer to one (500, time-out) is settled by reading the key.
"""

import errno
import io
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from urllib.parse import urlparse

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError

from posttrain_core.errors import ConfigError, ObjectNotFound, StoreError, StoreFull
from posttrain_core.store.protocol import ObjectInfo, check_key, check_prefix

T = TypeVar("T")

_ABSENT = {"NoSuchKey", "404", "NotFound"}
_LOST = {"PreconditionFailed", "412"}
_TRANSIENT = {"RequestTimeout", "RequestTimeTooSkewed"}  # 4xx that a second try may cure; so are 408, 409 and 429
_FULL = {"QuotaExceeded", "InsufficientStorage", "507"}
_ATTEMPTS = 6


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
        parts = urlparse(url)
        if not parts.netloc:
            raise ConfigError(f"store: {url!r} names no bucket; allowed: s3://bucket/prefix")
        config = Config(
            retries={"total_max_attempts": 1},  # ours: a retried conditional write must be settled by reading
            connect_timeout=10,
            read_timeout=60,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        )
        try:
            client = boto3.session.Session().client("s3", config=config)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"store: no S3 client for {url}: {error}") from error
        return cls(client, parts.netloc, parts.path.strip("/"))

    def get(self, key: str) -> bytes:
        return self._try("get", key, lambda: self._read(Key=self._key(key)))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if start < 0:
            size = self._size(key)
            start, length = max(0, size + start), min(length, size)
        if length <= 0:
            return b""
        span = f"bytes={start}-{start + length - 1}"
        try:
            return self._try("get", key, lambda: self._read(Key=self._key(key), Range=span))
        except StoreError as error:
            if _code(error.__cause__) in ("InvalidRange", "416"):
                return b""
            raise

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
        self._try("get", key, lambda: self._client.download_file(self._bucket, self._key(key), str(path)))

    def local_path(self, key: str) -> Path | None:
        return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        token: str | None = None
        check_prefix(prefix)
        while True:
            page = self._try("list", prefix, partial(self._page, prefix, token))
            for item in page.get("Contents", ()):
                modified = item["LastModified"].timestamp()
                yield ObjectInfo(
                    item["Key"].removeprefix(self._prefix), item["Size"], item["ETag"].strip('"'), modified
                )
            token = page.get("NextContinuationToken")
            if token is None:
                return

    def _page(self, prefix: str, token: str | None) -> Any:
        position = {"ContinuationToken": token} if token else {}
        return self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix + prefix, **position)

    def stat(self, key: str) -> ObjectInfo | None:
        try:
            head = self._try("stat", key, lambda: self._client.head_object(Bucket=self._bucket, Key=self._key(key)))
        except ObjectNotFound:
            return None
        return ObjectInfo(key, head["ContentLength"], head["ETag"].strip('"'), head["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        self._try("delete", key, lambda: self._client.delete_object(Bucket=self._bucket, Key=self._key(key)))

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _size(self, key: str) -> int:
        info = self.stat(key)
        if info is None:
            raise ObjectNotFound(f"no object {key!r} in store {self.url}")
        return info.num_bytes

    def _read(self, **arguments: str) -> bytes:
        with self._client.get_object(Bucket=self._bucket, **arguments)["Body"] as body:
            data: bytes = body.read()
        return data

    def _write(self, key: str, data: bytes, **condition: str) -> str:
        answer = self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=io.BytesIO(data), **condition)
        return str(answer["ETag"]).strip('"')

    def _upload(self, key: str, path: Path) -> None:
        with path.open("rb") as file:
            self._client.upload_fileobj(file, self._bucket, self._key(key))

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
            except (ClientError, BotoCoreError, OSError) as error:
                cause = error
            if attempt == 0 and _code(cause) in lost:
                return None
            if _final(cause) and _code(cause) not in lost:
                break
            self._pause(attempt)
            found = self.stat(key)
            if found is not None and self.get(key) == data:
                return found.etag
            if (found.etag if found else None) != condition.get("IfMatch"):
                return None
        raise self._failure("conditionally write", key, cause)

    def _try(self, operation: str, key: str, call: Callable[[], T]) -> T:
        cause: Exception | None = None
        for attempt in range(_ATTEMPTS):
            try:
                return call()
            except (ClientError, BotoCoreError, OSError) as error:
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
        error = kind(f"cannot {operation} {key!r} in store {self.url}: {cause}")
        error.__cause__ = cause
        return error


def _code(error: BaseException | None) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def _final(error: Exception) -> bool:
    """Whether trying again cannot help: the server refused, no credentials, or a fault of this machine's files."""
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        refused = 400 <= status < 500 and status not in (408, 409, 429)
        return (refused and _code(error) not in _TRANSIENT) or _code(error) in _FULL
    if isinstance(error, BotoCoreError):  # some of them are an OSError too
        return isinstance(error, NoCredentialsError | ParamValidationError)
    return not isinstance(error, ConnectionError | TimeoutError)
