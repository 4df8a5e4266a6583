"""start: what comes before the first iteration. A supervised warm start (sft) when asked for, then version 0."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from posttrain_core import layout
from posttrain_core.domains.mixture import exact_counts
from posttrain_core.errors import ConfigError, LearnerFault
from posttrain_core.layout import Scope
from posttrain_core.learner.protocol import Demonstration
from posttrain_core.learner.starting import starting_policy
from posttrain_core.manifest import (
    Manifest,
    ObjectRef,
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


def start(run: Run, session: LearnerSession) -> Manifest:
    """Commit policy version 0: the starting model, after the warm start where there is one."""
    key = layout.start_manifest(run.name, "publish")
    with tempfile.TemporaryDirectory(dir=run.scratch) as scratch:
        base = starting_policy(run.config, Path(scratch))
        inputs = {"model": _folder_digest(base)}
        expected = run.fingerprint(inputs, "model", "sft", *(("seed", "learner", "domains") if run.config.sft else ()))
        found = find_manifest(run.store, key, expected)
        if found is not None:
            return found
        prefix = layout.policy(run.name, 0, new_attempt())
        if run.config.sft is None:
            refs, metrics = commit_folder(run.store, prefix, base, semantic=True), {}
        else:
            trained = sft(run, session, base, expected)
            prefix, metrics = trained.notes["prefix"], dict(trained.metrics)
            refs = trained.named("/policies/")
    manifest = Manifest(
        "publish", -1, expected, tuple(refs), metrics, notes={"prefix": prefix}, code_version=code_version()
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
    rows = demonstrations(run, config.num_demonstrations)
    table = commit_table(run.store, layout.demonstrations(run.name), "demonstrations", rows, expected)
    examples = [Demonstration(row.prompt, row.response) for row in read_table(run.store, table, DemonstrationRow)]
    prefix = layout.policy(run.name, 0, new_attempt())
    with run.timed(Scope(0), "sft", examples=len(examples)), tempfile.TemporaryDirectory(dir=run.scratch) as folder:
        session.forget()
        session.learner.load_weights(base)
        metrics = session.learner.sft(examples, config, run.seed("sft"))
        session.learner.export_policy(Path(folder))
        refs: list[ObjectRef] = commit_folder(run.store, prefix, Path(folder), semantic=True)
    manifest = Manifest(
        "sft", -1, expected, (table, *refs), dict(metrics), notes={"prefix": prefix}, code_version=code_version()
    )
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


def _folder_digest(folder: Path) -> str:
    if not folder.is_dir():
        raise LearnerFault(f"model.path {folder} is not a folder")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_of([(path.relative_to(folder).as_posix(), file_digest(path)) for path in files])
