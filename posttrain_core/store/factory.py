"""From a URL or a path to a store."""

from pathlib import Path

from posttrain_core.errors import ConfigError
from posttrain_core.store.local import LocalStore
from posttrain_core.store.protocol import ObjectStore


def open_store(url: str) -> ObjectStore:
    """`s3://bucket/prefix`, `file:///folder`, or a folder. boto3 is imported only for S3."""
    if url.startswith("s3://"):
        from posttrain_core.store.s3 import S3Store

        return S3Store.from_url(url)
    if "://" in url and not url.startswith("file://"):
        raise ConfigError(
            f"store: {url!r} has an unknown scheme; allowed: a folder, file:///folder, s3://bucket/prefix"
        )
    return LocalStore(Path(url.removeprefix("file://")).expanduser().absolute())
