"""What every stage needs of the run it belongs to: its store, settings, domains, lease, telemetry and progress."""

import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel

from posttrain_core import layout
from posttrain_core.config import RunConfig, Section
from posttrain_core.domains.protocol import Domain
from posttrain_core.domains.registry import make_domain
from posttrain_core.errors import ConfigError, ObjectNotFound, RunConflict
from posttrain_core.layout import Scope
from posttrain_core.lease import Lease
from posttrain_core.manifest import (
    Fingerprint,
    Manifest,
    ObjectRef,
    check_fingerprint,
    code_version,
    commit_manifest,
    digest_of,
    environment,
    find_manifest,
    fingerprint,
)
from posttrain_core.sampling.protocol import Probe
from posttrain_core.schema import corrupt
from posttrain_core.stages.folders import LocalFolders
from posttrain_core.store.protocol import ObjectStore

PROCESS = uuid.uuid4().hex[:12]  # names this process in telemetry


class Progress(Protocol):
    """Told what is being computed and how far it is, from any thread."""

    def begin(self, label: str) -> None: ...

    def end(self, label: str) -> None: ...

    def advance(self, label: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None:
        """Something a user should know; one line."""


class NoProgress:
    def begin(self, label: str) -> None:
        return

    def end(self, label: str) -> None:
        return

    def advance(self, label: str, done: int, total: int) -> None:
        return

    def note(self, text: str) -> None:
        return


@dataclass(frozen=True)
class Origin:
    """Of a fork: the run that it was forked from, and the first iteration that is its own. `config` is the parent's:
    what iterations before `at` were made with. `before` is the parent's own origin, as in its `run.json`."""

    parent: str
    at: int
    config: Mapping[str, Any]
    before: Mapping[str, Any] | None = None


@dataclass
class Run:
    """One run that this process may write. `scratch` is a local folder for what need not outlive the process."""

    store: ObjectStore
    config: RunConfig
    lease: Lease
    scratch: Path
    progress: Progress = field(default_factory=NoProgress)
    folders: LocalFolders = field(init=False)

    def __post_init__(self) -> None:
        self.folders = LocalFolders(self.store, self.scratch / "folders")

    @property
    def name(self) -> str:
        return self.config.run

    @cached_property
    def origin(self) -> Origin | None:
        """None for a run that is no fork."""
        try:
            return read_origin(json.loads(self.store.get(layout.run_record(self.name))))
        except ObjectNotFound:
            return None

    @cached_property
    def domains(self) -> dict[str, Domain]:
        return {name: make_domain(name, config) for name, config in self.config.domains.items()}

    @cached_property
    def verdict_set(self) -> str:
        """Names the verdicts by the verifiers that made them."""
        return digest_of({name: domain.verifier_fingerprint() for name, domain in self.domains.items()})[:12]

    def seed(self, *path: str | int) -> int:
        """63 bits that depend on the run's seed and the path only."""
        text = json.dumps([self.config.seed, *path])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def fingerprint(self, inputs: Mapping[str, str], *sections: str) -> Fingerprint:
        """Of input digests and the semantic settings under the named sections of the configuration."""
        return fingerprint(inputs, {name: semantic_settings(getattr(self.config, name)) for name in sections})

    def manifest(self, scope: Scope, stage: str) -> Manifest:
        """A committed manifest. RunConflict when the stage has not come so far."""
        found = self.find(scope, stage)
        if found is None:
            raise RunConflict(f"{layout.manifest(self.name, scope, stage)} is missing: {stage} did not run")
        return found

    def find(self, scope: Scope, stage: str, expected: Fingerprint | None = None) -> Manifest | None:
        """The manifest where there is one. RunConflict when it has another fingerprint than `expected`."""
        return find_manifest(self.store, layout.manifest(self.name, scope, stage), expected)

    def commit(
        self,
        scope: Scope,
        stage: str,
        expected: Fingerprint,
        objects: Sequence[ObjectRef],
        metrics: Mapping[str, float] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """The stage is done from here on: its manifest, or the one that a faster process put down."""
        manifest = Manifest(
            stage, scope.iteration, expected, tuple(objects), metrics or {}, notes or {}, code_version=code_version()
        )
        return commit_manifest(self.store, layout.manifest(self.name, scope, stage), manifest, self.lease.check)

    def policy(self, version: int) -> Manifest:
        """The publish manifest of a policy version."""
        found = self.find_policy(version)
        if found is None:
            raise RunConflict(f"policy version {version} of run {self.name!r} was not published")
        return found

    def find_policy(self, version: int) -> Manifest | None:
        if version == 0:
            return find_manifest(self.store, layout.start_manifest(self.name, "publish"))
        return self.find(Scope(version - 1), "publish")

    def policy_folder(self, policy: Manifest) -> Path:
        """A local folder that holds a published policy's files, checked against their digests."""
        slot = "reference" if policy.iteration < 0 else "policy"  # version 0 stays in use beside the newest
        return self.folders.get(slot, policy.objects, policy.notes["prefix"])

    def probes(self, policy: Manifest) -> list[Probe]:
        """What proves that a sampler holds the policy. None for the scripted sampler's starting policy."""
        return [
            Probe(tuple(probe["prompt_ids"]), tuple(probe["response_ids"]), tuple(probe["logprobs"]))
            for probe in policy.notes.get("probes", ())
        ]

    @contextmanager
    def timed(self, scope: Scope, stage: str, shard: int = 0, **facts: Any) -> Iterator[dict[str, Any]]:
        """Telemetry of one computation, written when the block ends and before its result is committed."""
        record: dict[str, Any] = {"stage": stage, "shard": shard, "host": socket.gethostname(), "pid": os.getpid()}
        record |= {"process": PROCESS, **facts, "started": time.time()}
        label = f"{scope} {stage} {shard}"
        self.progress.begin(label)
        try:
            yield record
        finally:
            self.progress.end(label)
        record["ended"] = time.time()
        key = layout.telemetry(self.name, scope, stage, shard, new_attempt())
        self.store.put_volatile(key, json.dumps(record).encode())


def new_attempt() -> str:
    """Names one attempt at a multi-object output; nobody reads it until a manifest names it."""
    return uuid.uuid4().hex[:12]


def semantic_settings(value: Any) -> Any:
    """A setting as JSON without its operational fields."""
    if isinstance(value, Section):
        kept = {}
        for name, info in type(value).model_fields.items():
            extra = info.json_schema_extra
            if not isinstance(extra, dict) or extra.get("semantic", True):
                kept[name] = semantic_settings(getattr(value, name))
        return kept
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {name: semantic_settings(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [semantic_settings(item) for item in value]
    return value


def open_run(store: ObjectStore, config: RunConfig) -> str:
    """Write `run.json`, or check that the one found has the same semantic settings and put the operational ones down.

    Only the lease holder may call it. `first_config` keeps the settings that the run was started with. Returns a line
    about what else is not as it was then: versions, machine.
    """
    key = layout.run_record(config.run)
    record = new_record(config)
    if store.stat(key) is None and store.stat(layout.deletion(config.run)) is not None:
        raise RunConflict(
            f"run {config.run!r} was deleted, and its objects are still in {store.url}: `posttrain gc --delete` "
            "removes them, or start the run under another name (--set run=NAME)"
        )
    if store.put_if_absent(key, json.dumps(record, indent=1).encode()):
        return ""
    known = read_config(store, config.run)
    check_fingerprint(key, fingerprint({}, semantic_settings(known)), fingerprint({}, semantic_settings(config)))
    info = store.stat(key)
    if known != config and info is not None:
        found = json.loads(store.get(key))
        found = {"first_config": found["config"]} | found | {"config": record["config"]}
        store.put_if_match(key, json.dumps(found, indent=1).encode(), info.etag)
    before = json.loads(store.get(key))["environment"]
    changed = [f"{n} {before.get(n)} -> {v}" for n, v in environment().items() if before.get(n) != v]
    return f"not as when run {config.run!r} was started: {', '.join(changed)}" if changed else ""


def new_record(config: RunConfig) -> dict[str, Any]:
    """The contents of `run.json` of a run that starts now."""
    return {
        "config": config.model_dump(mode="json"),
        "code_version": code_version(),
        "environment": environment(),
        "created": time.strftime("%Y-%m-%d %H:%M:%S%z"),
    }


def read_origin(record: Mapping[str, Any]) -> Origin | None:
    """From the contents of `run.json`."""
    return Origin(**record["fork"]) if "fork" in record else None


def read_config(store: ObjectStore, run: str) -> RunConfig:
    """The settings that a run last went by; ConfigError when there is no such run."""
    key = layout.run_record(run)
    try:
        data = store.get(key)
    except ObjectNotFound as error:
        raise ConfigError(f"no run {run!r} in {store.url} (looked for {key})") from error
    try:
        return RunConfig.model_validate(json.loads(data)["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise corrupt(key, f"it holds no settings that this version can read ({error})") from error
