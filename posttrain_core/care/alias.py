"""alias: a name is pointed at a policy version, which is kept from then on.

The alias is written first and then the tombstones are looked at; retention leaves its tombstone first and then looks at
the aliases, so one sees the other.
"""

from posttrain_core import layout
from posttrain_core.errors import ConfigError, RunConflict
from posttrain_core.inspect.catalogue import Run
from posttrain_core.manifest import find_manifest
from posttrain_core.registry import Target, set_alias
from posttrain_core.stages.retention import retired, unavailable


def point_alias(run: Run, model: str, alias: str, version: int) -> None:
    """Point the model's alias at a policy version of the run. ConfigError when that was not published or is retired
    and not kept by an alias (naming the versions that can be had), RunConflict when it is retired meanwhile."""
    _ = run.record
    before = retired(run.store, run.name, "policies")
    gone = unavailable(run.store, run.name, "policies")
    if version not in run.policy_versions or version in gone:
        why = "retired (checkpoint.keep_last, keep_every)" if version in gone else "not published"
        possible = ", ".join(str(known) for known in run.policy_versions if known not in gone)
        raise ConfigError(
            f"alias: policy version {version} of run {run.name!r} in {run.store.url} was {why}; "
            f"possible: {possible or 'none'}"
        )
    published = find_manifest(run.store, layout.policy_manifest(run.name, version))
    assert published is not None, version
    set_alias(run.store, model, alias, Target(run.name, version, published.digest))
    if version in retired(run.store, run.name, "policies") - before:
        raise RunConflict(
            f"alias {alias!r} of {model!r}: run {run.name!r} retired policy version {version} while the alias "
            "was moved to it; give the command again: it says whether the version is still there, and which others are"
        )
