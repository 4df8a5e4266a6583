"""Where everything lies under a store's root: pure functions from names to keys."""

from dataclasses import dataclass

from posttrain_core.records import Purpose


@dataclass(frozen=True)
class Scope:
    """One pass through the stages: training iteration `iteration`, or the evaluation of policy version `iteration`."""

    iteration: int
    purpose: Purpose = Purpose.TRAIN

    def __str__(self) -> str:
        return f"{'iteration' if self.purpose is Purpose.TRAIN else str(self.purpose)} {self.iteration}"

    @property
    def _prefix(self) -> str:
        return "" if self.purpose is Purpose.TRAIN else f"{self.purpose}/"


def run_prefix(run: str) -> str:
    return f"runs/{run}/"


def run_of(key: str) -> str:
    """The run below whose prefix a key lies."""
    return key.split("/")[1]


def run_record(run: str) -> str:
    return f"{run_prefix(run)}run.json"


def deletion(run: str) -> str:
    """The mark of a deleted run. Its objects go with the next gc, but for those that forks need."""
    return f"{run_prefix(run)}deleted.json"


def lease(run: str) -> str:
    return f"{run_prefix(run)}lease.json"


def table(run: str, name: str, scope: Scope, shard: int) -> str:
    """`name` is plan, rollouts, executions or samples; evaluations lie under their own prefix in the same shape."""
    return f"{run_prefix(run)}{scope._prefix}{name}/iteration={scope.iteration:05d}/shard={shard:04d}.parquet"


def journal(run: str, scope: Scope, shard: int) -> str:
    """Prefix of the finished rollouts of a shard that is still being generated."""
    return f"{run_prefix(run)}{scope._prefix}journal/iteration={scope.iteration:05d}/shard={shard:04d}/"


def verdicts(run: str, verdict_set: str, scope: Scope, shard: int) -> str:
    return table(run, f"verdicts/set={verdict_set}", scope, shard)


def manifest(run: str, scope: Scope, stage: str) -> str:
    return f"{run_prefix(run)}{scope._prefix}manifests/iteration={scope.iteration:05d}/{stage}.json"


def policy_manifest(run: str, version: int) -> str:
    """The manifest with which a policy version was published."""
    return manifest(run, Scope(version - 1), "publish") if version else start_manifest(run, "publish")


def start_manifest(run: str, stage: str) -> str:
    """Stages before the first iteration: sft, publish."""
    return f"{run_prefix(run)}manifests/start/{stage}.json"


def demonstrations(run: str) -> str:
    return f"{run_prefix(run)}demonstrations/shard=0000.parquet"


def telemetry(run: str, scope: Scope, stage: str, shard: int, nonce: str) -> str:
    folder = f"{run_prefix(run)}{scope._prefix}telemetry/iteration={scope.iteration:05d}"
    return f"{folder}/{stage}.{shard:04d}.{nonce}.json"


def checkpoint(run: str, iteration: int, attempt: str) -> str:
    return f"{run_prefix(run)}checkpoints/iteration={iteration:05d}/attempt={attempt}/"


def policy(run: str, version: int, attempt: str) -> str:
    return f"{run_prefix(run)}policies/version={version:05d}/attempt={attempt}/"


def retired(run: str, kind: str, number: int) -> str:
    """A tombstone: `kind` is checkpoints or policies."""
    return f"{run_prefix(run)}retired/{kind}/{number:05d}.json"


def forks(run: str) -> str:
    """Prefix of the notes about forks that need objects of this run: retention leaves those alone."""
    return f"{run_prefix(run)}forks/"


def fork_note(run: str, fork: str) -> str:
    return f"{forks(run)}{fork}.json"


def registries() -> str:
    """Prefix of the aliases of all models: retention and gc leave alone what those point at."""
    return "registry/"


def registry(model: str) -> str:
    """The aliases of a model, which may point at policies of any run."""
    return f"{registries()}{model}.json"
