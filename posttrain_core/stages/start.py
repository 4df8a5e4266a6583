"""start: what comes before the first iteration. A supervised warm start (sft) when asked for, then version 0."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from posttrain_core import layout
from posttrain_core.domains.mixture import exact_counts
from posttrain_core.errors import ConfigError, LearnerFault
from posttrain_core.layout import Scope
from posttrain_core.learner.protocol import Demonstration
from posttrain_core.learner.starting import starting_policy
from posttrain_core.manifest import (
    Manifest,
    ObjectRef,
    check_fingerprint,
    code_version,
    commit_folder,
    commit_manifest,
    commit_table,
    digest_of,
    file_digest,
    find_manifest,
    read_table,
)
from posttrain_core.schema import DemonstrationRow
from posttrain_core.stages.context import Run, new_attempt
from posttrain_core.stages.session import LearnerSession

PROBE_TOKENS = 16
_POLICY_SUFFIXES = {".json", ".safetensors", ".bin", ".jinja", ".model", ".txt"}


def start(run: Run, session: LearnerSession) -> Manifest:
    """Commit policy version 0: the starting model, after the warm start where there is one."""
    key = layout.start_manifest(run.name, "publish")
    sections = ("model", "sft", *(("seed", "learner", "domains") if run.config.sft else ()))
    found = find_manifest(run.store, key)
    if found is not None and run.origin is not None:  # shared with the parent; `fork` judged what may differ
        return found
    if found is not None:  # from here on the store has what model.path had: the folder may be gone
        check_fingerprint(
            key, found.fingerprint, run.fingerprint({"model": found.fingerprint["input.model"]}, *sections)
        )
        return found
    with tempfile.TemporaryDirectory(dir=run.scratch) as scratch:
        base = _policy_files(starting_policy(run.config, Path(scratch) / "made"), Path(scratch) / "files")
        expected = run.fingerprint({"model": _folder_digest(base)}, *sections)
        prefix = layout.policy(run.name, 0, new_attempt())
        if run.config.sft is None:
            _load(session, base, run.config.model.path)
            refs, metrics = commit_folder(run.store, prefix, base, semantic=True), {}
            probes = starting_probes(session, base)
        else:
            trained = sft(run, session, base, expected)
            prefix, metrics, probes = trained.notes["prefix"], dict(trained.metrics), trained.notes["probes"]
            refs = trained.named("/policies/")
    manifest = Manifest(
        "publish",
        -1,
        expected,
        tuple(refs),
        metrics,
        notes={"prefix": prefix, "probes": probes},
        code_version=code_version(),
    )
    return commit_manifest(run.store, key, manifest, run.lease.check)


def sft(run: Run, session: LearnerSession, base: Path, expected: Mapping[str, object]) -> Manifest:
    """Train `base` on demonstrations drawn from the domains; one manifest names the examples and the weights."""
    key = layout.start_manifest(run.name, "sft")
    found = find_manifest(run.store, key, expected)
    if found is not None:
        return found
    config = run.config.sft
    assert config is not None
    run.progress.note(f"warm start on {config.num_demonstrations} examples")
    _load(session, base, run.config.model.path)
    rows = demonstrations(run, config.num_demonstrations)
    table = commit_table(run.store, layout.demonstrations(run.name), "demonstrations", rows, expected)
    examples = [Demonstration(row.prompt, row.response) for row in read_table(run.store, table, DemonstrationRow)]
    prefix = layout.policy(run.name, 0, new_attempt())
    with run.timed(Scope(0), "sft", examples=len(examples)), tempfile.TemporaryDirectory(dir=run.scratch) as folder:
        metrics = session.learner.sft(examples, config, run.seed("sft"))
        session.learner.export_policy(Path(folder))
        refs: list[ObjectRef] = commit_folder(run.store, prefix, Path(folder), semantic=True)
        notes = {"prefix": prefix, "probes": starting_probes(session, base)}
    manifest = Manifest("sft", -1, expected, (table, *refs), dict(metrics), notes, code_version=code_version())
    return commit_manifest(run.store, key, manifest, run.lease.check)


def demonstrations(run: Run, num: int) -> list[DemonstrationRow]:
    """Examples from the domains that have some, by weight."""
    weights = [config.weight for config in run.config.domains.values()]
    rows = []
    for (name, domain), share in zip(run.domains.items(), exact_counts(weights, num), strict=True):
        for example in domain.demonstrations(share, run.seed("demonstrations", name)):
            rows.append(DemonstrationRow(name, example.prompt, example.response))
    if not rows:
        raise ConfigError(f"sft: none of the domains {sorted(run.domains)} has demonstrations; remove the section sft")
    return rows


def starting_probes(session: LearnerSession, folder: Path) -> list[dict[str, Any]]:
    """Any tokens of the vocabulary prove which policy a sampler holds; none where there is no config.json."""
    path = folder / "config.json"
    if not path.is_file():
        return []
    config = json.loads(path.read_text())
    size = int(config.get("text_config", config)["vocab_size"])
    random = Random(0)
    ids = [[random.randrange(size) for _ in range(PROBE_TOKENS)] for _ in range(2)]
    return [session.probe(prompt, response) for prompt, response in (ids, ids[::-1])]


def _load(session: LearnerSession, base: Path, named: str) -> None:
    """A model that cannot be loaded must not become version 0: ConfigError."""
    session.forget()
    try:
        session.learner.load_weights(base)
    except LearnerFault as error:
        raise ConfigError(f"model.path: the model in {named or base} cannot be loaded: {error}") from error


def _policy_files(folder: Path, into: Path) -> Path:
    """Links to what makes up a policy; other things lie in such folders too (optimizer states, hidden files)."""
    into.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.suffix in _POLICY_SUFFIXES and not path.name.startswith("."):
            (into / path.name).symlink_to(path.absolute())
    return into


def _folder_digest(folder: Path) -> str:
    return digest_of([(path.name, file_digest(path)) for path in sorted(folder.iterdir())])
