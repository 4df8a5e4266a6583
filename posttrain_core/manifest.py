"""Commits: a table is one object, a stage is one manifest that names its objects.

A *fingerprint* is the flat dict of everything that an object depends on: digests of its inputs, the semantic settings
that its stage reads, the schema version. Found with the same fingerprint an object is adopted; with another one the
run stops and says which field differs.
"""

import hashlib
import json
import os
import platform
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from posttrain_core.errors import ObjectNotFound, RunConflict
from posttrain_core.schema import SCHEMA_VERSION, TABLES, corrupt, from_parquet, from_table, to_parquet, to_table
from posttrain_core.store.protocol import ObjectStore

R = TypeVar("R")
T = TypeVar("T")
Fingerprint = Mapping[str, Any]


@dataclass(frozen=True)
class ObjectRef:
    """A committed object. `semantic` is false for what may differ between two runs of the same thing (checkpoints)."""

    key: str
    digest: str  # sha256 of the bytes
    num_bytes: int
    num_rows: int = -1  # -1: not a table
    semantic: bool = True


@dataclass(frozen=True)
class Manifest:
    """The commit record of a stage. `metrics` are semantic; `notes` are not."""

    stage: str
    iteration: int
    fingerprint: Fingerprint
    objects: tuple[ObjectRef, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    code_version: str = ""

    @property
    def digest(self) -> str:
        """Of what is semantic: equal for two runs of the same thing, whatever their attempts were called."""
        contents = [(Path(ref.key).name, ref.digest) for ref in self.objects if ref.semantic]
        return digest_of([self.stage, self.iteration, self.fingerprint, contents, dict(self.metrics)])

    def named(self, suffix: str) -> list[ObjectRef]:
        """The objects whose key contains `suffix`."""
        return [ref for ref in self.objects if suffix in ref.key]


def digest_of(value: Any) -> str:
    """sha256 of canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=dict).encode()).hexdigest()


def fingerprint(inputs: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dict: `input.<name>` digests, `config.<path>` values, the schema version."""
    flat: dict[str, Any] = {"schema": SCHEMA_VERSION}
    flat |= {f"input.{name}": digest for name, digest in inputs.items()}
    _flatten("config", settings, flat)
    return flat


def _flatten(path: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            _flatten(f"{path}.{name}", item, into)
    else:
        into[path] = list(value) if isinstance(value, tuple) else value


def check_fingerprint(key: str, found: Fingerprint, expected: Fingerprint) -> None:
    """RunConflict, naming each differing field and the ways out."""
    found, expected = json.loads(json.dumps(found, default=dict)), json.loads(json.dumps(expected, default=dict))
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if names:
        lines = [f"  {name}: was {found.get(name)!r}, is {expected.get(name)!r}" for name in names[:8]]
        raise RunConflict(
            f"{key} was made with other settings or inputs:\n" + "\n".join(lines) + "\n"
            "Restore the former value, or start a new run under another name (--set run=NAME)"
        )


# --- tables -----------------------------------------------------------------------------------------------------


def commit_table(store: ObjectStore, key: str, name: str, records: Sequence[Any], expected: Fingerprint) -> ObjectRef:
    """Write the table once; the loser of a race adopts the winner's."""
    data = to_parquet(to_table(name, records), expected)
    if store.put_if_absent(key, data):
        return ObjectRef(key, hashlib.sha256(data).hexdigest(), len(data), len(records))
    return _adopted(find_table(store, key, expected), key)


def find_table(store: ObjectStore, key: str, expected: Fingerprint) -> ObjectRef | None:
    """The committed object, checked, or None when there is none. RunConflict when it was made with other settings."""
    try:
        data = store.get(key)
    except ObjectNotFound:
        return None
    table, found = from_parquet(data, key)
    check_fingerprint(key, found, expected)
    return ObjectRef(key, hashlib.sha256(data).hexdigest(), len(data), table.num_rows)


def read_table(store: ObjectStore, ref: ObjectRef, record: type[R]) -> list[R]:
    """The rows of an object that a reference names; ObjectCorrupt when the bytes are not the ones committed."""
    assert record in TABLES.values(), record
    return from_table(record, from_parquet(read_object(store, ref), ref.key)[0])


def read_object(store: ObjectStore, ref: ObjectRef) -> bytes:
    data = store.get(ref.key)
    if hashlib.sha256(data).hexdigest() != ref.digest:
        raise corrupt(
            ref.key, f"{len(data)} bytes that do not match the digest in its manifest ({ref.num_bytes} bytes)"
        )
    return data


# --- folders of files -------------------------------------------------------------------------------------------


def commit_folder(store: ObjectStore, prefix: str, folder: Path, semantic: bool) -> list[ObjectRef]:
    """Upload every file of `folder` under an attempt's prefix; nobody reads them until a manifest names them."""
    refs = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = prefix + path.relative_to(folder).as_posix()
        store.put_file(key, path)
        refs.append(ObjectRef(key, file_digest(path), path.stat().st_size, semantic=semantic))
    return refs


def fetch_folder(store: ObjectStore, refs: Sequence[ObjectRef], prefix: str, cache: Path) -> Path:
    """A local folder that holds the objects, checked: in place for a local store, else below `cache`."""
    root = store.local_path(prefix.rstrip("/"))
    in_place = root is not None
    root = root or cache / hashlib.sha256(prefix.encode()).hexdigest()[:24]
    for ref in refs:
        path = root / ref.key.removeprefix(prefix)
        intact = _matches(path, ref)
        if not intact and not in_place:
            _download(store, ref, path)
            intact = _matches(path, ref)
        if not intact:
            if not path.is_file():
                raise ObjectNotFound(f"object {ref.key!r} is gone, but a manifest names it: restore it from a copy")
            raise corrupt(ref.key, "it does not match the digest in its manifest")
    return root


def _matches(path: Path, ref: ObjectRef) -> bool:
    return path.is_file() and path.stat().st_size == ref.num_bytes and file_digest(path) == ref.digest


def _download(store: ObjectStore, ref: ObjectRef, path: Path) -> None:
    """Whole or not at all, so that a download that was cut off is not taken for the object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        store.get_file(ref.key, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- manifests --------------------------------------------------------------------------------------------------


def commit_manifest(store: ObjectStore, key: str, manifest: Manifest, check: Callable[[], None]) -> Manifest:
    """The commit of a stage. `check` raises when the lease is lost. The loser of a race adopts the winner's."""
    check()
    record = asdict(manifest) | {"digest": manifest.digest}
    record["checksum"] = digest_of(record)
    if store.put_if_absent(key, json.dumps(record, sort_keys=True, indent=1, default=dict).encode()):
        return manifest
    return _adopted(find_manifest(store, key, manifest.fingerprint), key)


def find_manifest(store: ObjectStore, key: str, expected: Fingerprint | None = None) -> Manifest | None:
    """The committed manifest or None; `expected` is checked when given."""
    try:
        data = store.get(key)
    except ObjectNotFound:
        return None
    manifest = parse_manifest(data, key)
    if expected is not None:
        check_fingerprint(key, manifest.fingerprint, expected)
    return manifest


def parse_manifest(data: bytes, key: str) -> Manifest:
    try:
        record = json.loads(data)
        intact = record.pop("checksum") == digest_of(record)
        del record["digest"]  # derived; there for readers without this code
        objects = tuple(ObjectRef(**item) for item in record.pop("objects"))
        manifest = Manifest(objects=objects, **record)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise corrupt(key, f"it is not a manifest ({error})") from error
    if not intact:
        raise corrupt(key, "its contents do not match its own checksum")
    return manifest


def _adopted(found: T | None, key: str) -> T:
    if found is None:
        raise ObjectNotFound(f"{key} was written by another process and deleted at once; resume the run")
    return found


def code_version() -> str:
    """Recorded with each manifest and reported when it changes, never refused."""
    try:
        return version("posttrain")
    except PackageNotFoundError:
        return "unknown"


def environment() -> dict[str, str]:
    """What may explain a difference between two machines."""
    names = ("posttrain", "torch", "transformers", "deepspeed", "numpy", "pyarrow", "reasoning-gym")
    found = {"python": platform.python_version(), "machine": platform.machine(), "cores": str(os.cpu_count())}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
