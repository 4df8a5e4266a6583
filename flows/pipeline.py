"""The order of things, whatever runs them: a training run is a start and iterations; an iteration is six stages."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from posttrain_core import layout
from posttrain_core.config import RunConfig
from posttrain_core.layout import Scope
from posttrain_core.learner.factory import make_learner
from posttrain_core.lease import Lease
from posttrain_core.manifest import Manifest
from posttrain_core.records import Purpose
from posttrain_core.sampling.factory import make_sampler
from posttrain_core.sampling.protocol import Sampler
from posttrain_core.sandbox.factory import make_sandbox
from posttrain_core.sandbox.protocol import Sandbox
from posttrain_core.stages.context import NoProgress, Progress, Run, open_run
from posttrain_core.stages.execute import commit_execute, execute_shard
from posttrain_core.stages.generate import commit_generate, generate_shard
from posttrain_core.stages.plan import plan
from posttrain_core.stages.publish import publish
from posttrain_core.stages.retention import Retention
from posttrain_core.stages.session import LearnerSession
from posttrain_core.stages.start import start
from posttrain_core.stages.update import update
from posttrain_core.stages.verify import commit_verify, verify_shard
from posttrain_core.store import open_store
from posttrain_core.store.probe import check_conditional_writes
from tasks.runner import Label, Runner


@dataclass
class Services:
    """What stays warm over the iterations of one process."""

    run: Run
    sampler: Sampler
    sandbox: Sandbox
    session: LearnerSession
    retention: Retention


@contextmanager
def open_services(config: RunConfig, scratch: Path, progress: Progress | None = None) -> Iterator[Services]:
    """Take the run's lease and start its services; everything is gone when the block ends."""
    with ExitStack() as stack:
        store = open_store(config.store)
        if store.stat(layout.run_record(config.run)) is None or not config.store_is_local:
            check_conditional_writes(store)
        lease = stack.enter_context(Lease(store, config.run))
        changed = open_run(store, config)
        run = Run(store, config, lease, scratch, progress or NoProgress())
        if changed:
            run.progress.note(changed)
        learner = make_learner(config, scratch, partial(_learner_progress, run))
        stack.callback(learner.close)
        learner.start()
        sandbox = make_sandbox(config.sandbox)
        stack.callback(sandbox.close)
        sampler = make_sampler(config, scratch, run.progress.note)
        stack.callback(sampler.close)
        yield Services(run, sampler, sandbox, LearnerSession(run, learner), Retention(run))


Block = Callable[[Services, int, int], None]  # iterations from the first up to, not including, the last


def train(services: Services, runner: Runner, block: Block | None = None) -> int:
    """Iterations until the stop rule holds. Whatever the store already holds is adopted. Returns the last version.

    `block` stands in for `iterate_block` where a block of iterations is more than a call (a flow run of its own).
    """
    run, run_block = services.run, block or partial(iterate_block, runner=runner)
    begin(services, runner)
    for first, last in blocks(run.config):
        due = first % run.config.eval.every == 0 and _can_evaluate(run, first)
        if due and stops(run, evaluate(services, runner, first)):
            return first
        if run.find_policy(last) is None:
            run_block(services, first, last)
        else:
            services.retention.apply(last)  # a process before this one may have been killed before it did
    if _can_evaluate(run, run.config.iterations):
        evaluate(services, runner, run.config.iterations)
    return run.config.iterations


def begin(services: Services, runner: Runner) -> Manifest:
    """Policy version 0, with the warm start where there is one."""
    label = Label(services.run.name, Scope(0), "start")
    policy: Manifest = runner.submit(label, start, services.run, services.session).result()
    return policy


def blocks(config: RunConfig) -> list[tuple[int, int]]:
    """The iterations in stretches without an evaluation, each at most `prefect.iterations_per_flow_run` long."""
    steps = (config.eval.every, config.prefect.iterations_per_flow_run)
    cuts = sorted({config.iterations} | {cut for step in steps for cut in range(0, config.iterations, step)})
    return list(pairwise(cuts))


def iterate_block(services: Services, first: int, last: int, runner: Runner) -> None:
    """The iterations of a block that have not been published yet, one after another."""
    run = services.run
    for iteration in range(first, last):
        if run.find_policy(iteration + 1) is None:
            iterate(services, runner, iteration)
            run.progress.note(_summary(run, Scope(iteration)))
        run.progress.advance("iterations", iteration + 1, run.config.iterations)
        services.retention.apply(iteration + 1)


def iterate(services: Services, runner: Runner, iteration: int) -> Manifest:
    """One iteration: plan, then generate, execute and verify shard by shard, then update and publish."""
    run, scope = services.run, Scope(iteration)
    roll_out(services, runner, scope)
    services.sampler.release()
    runner.submit(Label(run.name, scope, "update"), update, run, scope, services.session).result()
    published: Manifest = runner.submit(
        Label(run.name, scope, "publish"), publish, run, scope, services.session
    ).result()
    return published


def evaluate(services: Services, runner: Runner, version: int) -> Manifest:
    """The held-out problems under policy version `version`: the same stages, without update and publish."""
    scope = Scope(version, Purpose.EVAL)
    found = services.run.find(scope, "verify")
    if found is None:
        found = roll_out(services, runner, scope)
        services.run.progress.note(_summary(services.run, scope))
    return found


def roll_out(services: Services, runner: Runner, scope: Scope) -> Manifest:
    """plan, then each shard its own chain of generate, execute and verify, joined by the stages' manifests."""
    run = services.run
    planned: Manifest = runner.submit(Label(run.name, scope, "plan"), plan, run, scope).result()
    chains = []
    for shard in range(len(planned.objects)):
        rollouts = runner.submit(
            Label(run.name, scope, "generate", shard), generate_shard, run, scope, shard, services.sampler
        )
        executions = runner.submit(
            Label(run.name, scope, "execute", shard), execute_shard, run, scope, shard, rollouts, services.sandbox
        )
        verdicts = runner.submit(
            Label(run.name, scope, "verify", shard), verify_shard, run, scope, shard, rollouts, executions
        )
        chains.append((rollouts, executions, verdicts))
    done = [[pending.result() for pending in chain] for chain in chains]
    commit_generate(run, scope, [chain[0] for chain in done])
    commit_execute(run, scope, [chain[1] for chain in done])
    return commit_verify(run, scope, [chain[2] for chain in done])


def _learner_progress(run: Run, done: int, total: int) -> None:
    """A bar for what takes several optimizer steps."""
    if total > 1:
        run.progress.advance("optimizer steps", done, total)
    if done == total:
        run.progress.end("optimizer steps")


def stops(run: Run, verified: Manifest) -> bool:
    """Whether the stop rule holds after an evaluation."""
    goal = run.config.stop.eval_pass_rate
    return goal is not None and verified.metrics.get("pass_rate", 0.0) >= goal


def _can_evaluate(run: Run, version: int) -> bool:
    """A version that has a successor may be retired: of such ones only the evaluations made in their time count."""
    return run.find_policy(version + 1) is None or run.find(Scope(version, Purpose.EVAL), "verify") is not None


def _summary(run: Run, scope: Scope) -> str:
    """One line for the terminal."""
    verified = run.manifest(scope, "verify").metrics
    if scope.purpose is not Purpose.TRAIN:
        rate = f"{verified['pass_rate']:.3f}" if "pass_rate" in verified else "unknown, no rollout could be judged"
        return f"version {scope.iteration}: held-out pass rate {rate}"
    updated = run.manifest(scope, "update").metrics
    numbers = f"entropy {updated.get('entropy', 0.0):.3f}, gradient norm {updated.get('grad_norm', 0.0):.3f}"
    return f"iteration {scope.iteration}: reward {verified.get('reward_mean', 0.0):.3f}, {numbers}"
