"""What the tests of this folder say about a store."""

import json
import re
from pathlib import Path
from typing import Any

from posttrain_core import layout
from posttrain_core.care.fork import Forked, fork
from posttrain_core.config import RunConfig
from posttrain_core.manifest import digest_of, parse_manifest
from posttrain_core.store import ObjectStore, open_store
from tests.test_faults import train


def forked(config: RunConfig, at: int, name: str, **changes: Any) -> tuple[RunConfig, Forked]:
    """A fork of the run with that configuration, and its own configuration."""
    data = config.model_dump(mode="json") | changes | {"run": name}
    own = RunConfig.model_validate(data)
    return own, fork(open_store(config.store), config.run, at, own)


def digests(store: str | Path, run: str) -> dict[str, str]:
    """The digest of every manifest of a run, by its key below the run."""
    opened, prefix = open_store(str(store)), layout.run_prefix(run)
    keys = [info.key for info in opened.list(prefix) if "/manifests/" in info.key]
    return {key.removeprefix(prefix): parse_manifest(opened.get(key), key).digest for key in keys}


def iteration_of(key: str) -> int:
    """-1 for the start."""
    match = re.search(r"iteration=(\d+)/", key)
    return int(match[1]) if match else -1


def rewrite(store: ObjectStore, key: str, change: dict[str, Any]) -> None:
    """A manifest with other fields, its checksum and digest made to fit again."""
    record = json.loads(store.get(key)) | change
    del record["checksum"], record["digest"]
    store.delete(key)
    sealed = json.dumps(record).encode()
    digest = parse_manifest(json.dumps(_sealed(json.loads(sealed), "")).encode(), key).digest
    store.put(key, json.dumps(_sealed(json.loads(sealed), digest)).encode())


def _sealed(record: dict[str, Any], digest: str) -> dict[str, Any]:
    record = record | {"digest": digest}
    return record | {"checksum": digest_of(record)}


__all__ = ["digests", "forked", "iteration_of", "rewrite", "train"]
