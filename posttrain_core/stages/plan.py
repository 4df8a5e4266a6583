"""plan: which problems, how many rollouts each, with which seeds, budgets and policy version.

A pure function of the run's seed and settings, and of the policy version it samples. Immutable once committed.
"""

from collections.abc import Iterator, Sequence
from random import Random

from posttrain_core import layout
from posttrain_core.domains.mixture import exact_counts, training_counts
from posttrain_core.domains.protocol import Domain
from posttrain_core.errors import ConfigError, RunConflict
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, commit_table
from posttrain_core.records import PlanRow, Problem, Purpose, Split
from posttrain_core.schema import problem_json
from posttrain_core.stages.context import Run


def plan(run: Run, scope: Scope) -> Manifest:
    """Commit the plan of an iteration or an evaluation: one table per shard."""
    sections = ("seed", "domains", "plan") if scope.purpose is Purpose.TRAIN else ("seed", "domains", "plan", "eval")
    # Problems and verifiers come from the same code and packages: with other ones this would be another plan.
    inputs = {"policy": run.policy(scope.iteration).digest, "verifiers": run.verdict_set}
    expected = run.fingerprint(inputs, *sections)
    found = run.find(scope, "plan", expected)
    if found is not None:
        return found
    _same_verifiers(run, scope)
    with run.timed(scope, "plan"):
        rows = list(plan_rows(run, scope))
        shards = split_shards(rows, run.config.plan.rollouts_per_shard)
    refs = [
        commit_table(run.store, layout.table(run.name, "plan", scope, shard), "plan", part, expected)
        for shard, part in enumerate(shards)
    ]
    counts = {"rollouts": float(len(rows)), "groups": float(len({row.group_id for row in rows}))}
    return run.commit(scope, "plan", expected, refs, counts)


def plan_rows(run: Run, scope: Scope) -> Iterator[PlanRow]:
    """The rollouts of an iteration or an evaluation, group by group."""
    evaluating = scope.purpose is not Purpose.TRAIN
    settings = run.config.eval if evaluating else None
    num_samples = settings.samples_per_problem if settings else run.config.plan.group_size
    temperature = settings.temperature if settings else run.config.plan.temperature
    label = "e" if evaluating else "i"
    for number, (problem, occurrence) in enumerate(_problems(run, scope)):
        group_id = f"{label}{scope.iteration:05d}.p{number:04d}"
        text, domain = problem_json(problem), run.config.domains[problem.domain]
        for index in range(num_samples):
            stream = "eval" if evaluating else scope.iteration  # evaluations of all versions use the same seeds
            yield PlanRow(
                rollout_id=f"{group_id}.r{index:02d}",
                group_id=group_id,
                problem_id=problem.id,
                domain=problem.domain,
                purpose=scope.purpose,
                sample_index=index,
                seed=run.seed("rollout", stream, problem.id, occurrence, index),
                policy_version=scope.iteration,
                max_new_tokens=domain.max_new_tokens or run.config.plan.max_new_tokens,
                temperature=temperature,
                stop=domain.stop,
                problem=text,
            )


def split_shards(rows: Sequence[PlanRow], size: int) -> list[list[PlanRow]]:
    """Shards of at most `size` rollouts (more only when one group is larger); a group is never split."""
    groups: dict[str, list[PlanRow]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)
    shards: list[list[PlanRow]] = []
    for group in groups.values():
        if not shards or len(shards[-1]) + len(group) > size:
            shards.append([])
        shards[-1].extend(group)
    return shards


def _problems(run: Run, scope: Scope) -> Iterator[tuple[Problem, int]]:
    """Problems, and how often each has come before."""
    weights = [config.weight for config in run.config.domains.values()]
    if scope.purpose is Purpose.TRAIN:
        size = run.config.plan.problems_per_iteration
        before = training_counts(weights, size * scope.iteration)
        after = training_counts(weights, size * (scope.iteration + 1))
        split = Split.TRAIN
    else:
        before, after = [0] * len(weights), exact_counts(weights, run.config.eval.num_problems)
        split = Split.HELD_OUT
    for domain, start, end in zip(run.domains.values(), before, after, strict=True):
        size = domain.num_problems(split)
        if split is Split.HELD_OUT and end > size:
            raise ConfigError(
                f"eval.num_problems is {run.config.eval.num_problems}, of which domain {domain.name!r} has to give "
                f"{end}: it holds out only {size} problems, and one judged twice would count as two"
            )
        for offset in range(start, end):
            yield domain.problem(split, _index(run, domain, split, offset)), offset // size


def _same_verifiers(run: Run, scope: Scope) -> None:
    """RunConflict when the iteration before was judged by other verifiers: an upgraded package, changed code. Not
    where a fork begins: whoever forks may want other ones from there on."""
    if run.origin is not None and scope.iteration == run.origin.at:
        return
    before = run.find(Scope(scope.iteration - 1), "verify") if scope.iteration else None
    known = before.fingerprint.get("input.verifiers", run.verdict_set) if before else run.verdict_set
    if known != run.verdict_set:
        raise RunConflict(
            f"run {run.name!r}: iteration {scope.iteration - 1} was judged by verifiers {known}, these are "
            f"{run.verdict_set}: a domain's code or package was changed in between. Put the former one back, or start "
            "a new run under another name (--set run=NAME)"
        )


def _index(run: Run, domain: Domain, split: Split, offset: int) -> int:
    """Every problem once per pass over the split, each pass in an order of its own."""
    size = domain.num_problems(split)
    epoch, place = divmod(offset, size)
    order = list(range(size))
    Random(run.seed("order", domain.name, split, epoch)).shuffle(order)
    return order[place]
