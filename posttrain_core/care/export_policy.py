"""export policy: a published policy version as a Hugging Face model folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posttrain_core import layout
from posttrain_core.care.cards import model_card
from posttrain_core.care.inventory import in_parallel
from posttrain_core.care.targets import new_folder
from posttrain_core.errors import ConfigError
from posttrain_core.inspect.catalogue import Run
from posttrain_core.manifest import Manifest, ObjectRef, file_digest, find_manifest
from posttrain_core.schema import corrupt
from posttrain_core.stages.retention import unavailable


@dataclass(frozen=True)
class ExportedPolicy:
    version: int
    num_files: int
    num_bytes: int


def export_policy(
    run: Run, target: Path, version: int | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> ExportedPolicy:
    """Copy the files of a version (the newest by default), each checked against its digest, and add a model card.
    ConfigError when the folder exists or the version is not there; ObjectCorrupt for a damaged file."""
    versions = run.policy_versions
    gone = unavailable(run.store, run.name, "policies")
    kept = [known for known in versions if known not in gone]
    version = kept[-1] if version is None and kept else version
    if version is None or version not in kept:
        why = "was retired (checkpoint.keep_last, keep_every)" if version in versions else "was not published"
        raise ConfigError(
            f"policy version {version} of run {run.name!r} {why}; there are {', '.join(map(str, kept)) or 'none'}"
        )
    policy = _policy(run, version)
    prefix = str(policy.notes["prefix"])
    refs = [ref for ref in policy.objects if ref.key.startswith(prefix)]
    with new_folder(target) as folder:
        done = 0

        def copy(ref: ObjectRef) -> None:
            nonlocal done
            path = folder / ref.key.removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            run.store.get_file(ref.key, path)
            if file_digest(path) != ref.digest:
                raise corrupt(ref.key, "it does not match the digest in its manifest")
            done += 1
            progress(done, len(refs))

        in_parallel(copy, refs)
        (folder / "README.md").write_text(model_card(run, version, policy), encoding="utf-8")
    return ExportedPolicy(version, len(refs), sum(ref.num_bytes for ref in refs))


def _policy(run: Run, version: int) -> Manifest:
    found = find_manifest(run.store, layout.policy_manifest(run.name, version))
    assert found is not None, version
    return found
