"""execute: a fresh sandbox that the policy never touched runs each work product on inputs the policy never saw."""

from dataclasses import replace

from posttrain_core import layout
from posttrain_core.errors import SandboxFault
from posttrain_core.layout import Scope
from posttrain_core.manifest import (
    Manifest,
    ObjectRef,
    commit_table,
    find_table,
    read_table,
)
from posttrain_core.records import Execution, ExecutionStatus, Outcome, PlanRow, Rollout
from posttrain_core.sandbox.protocol import Limits, ProgramRequest, ProgramResult, Sandbox
from posttrain_core.schema import parse_problem
from posttrain_core.stages.context import Run

CANARY = ProgramRequest("x + 1", "", ("[1]",))


def execute_shard(run: Run, scope: Scope, shard: int, rollouts: ObjectRef, sandbox: Sandbox) -> ObjectRef:
    """Commit one shard of executions, or adopt the one that is there."""
    plan = run.manifest(scope, "plan").objects[shard]
    expected = run.fingerprint({"plan": plan.digest, "rollouts": rollouts.digest}, "sandbox", "domains")
    key = layout.table(run.name, "executions", scope, shard)
    found = find_table(run.store, key, expected)
    if found is not None:
        return found
    rows = read_table(run.store, rollouts, Rollout)
    problems = {row.rollout_id: row.problem for row in read_table(run.store, plan, PlanRow)}
    with run.timed(scope, "execute", shard) as telemetry:
        programs = [_program(run, row, problems[row.rollout_id]) for row in rows]
        executions = _execute(run, rows, programs, sandbox)
        telemetry["executions"] = len(executions)
        telemetry["programs"] = len({program for program in programs if program})
    return commit_table(run.store, key, "executions", executions, expected)


def commit_execute(run: Run, scope: Scope, shards: list[ObjectRef]) -> Manifest:
    """The stage's manifest, once every shard is there."""
    expected = run.fingerprint({"generate": run.manifest(scope, "generate").digest}, "sandbox", "domains")
    return run.find(scope, "execute", expected) or run.commit(scope, "execute", expected, shards)


def _program(run: Run, rollout: Rollout, problem: str) -> ProgramRequest | None:
    if rollout.outcome is not Outcome.SCORED:
        return None
    return run.domains[rollout.domain].program(parse_problem(problem), rollout)


def _execute(
    run: Run, rollouts: list[Rollout], programs: list[ProgramRequest | None], sandbox: Sandbox
) -> list[Execution]:
    """One row per rollout, in order; each distinct program of a domain runs once."""
    results: dict[str, Execution] = {}
    for name, domain in run.domains.items():
        batch = [
            (rollout.rollout_id, program)
            for rollout, program in zip(rollouts, programs, strict=True)
            if program is not None and rollout.domain == name
        ]
        distinct = list(dict.fromkeys(program for _, program in batch))
        answers = dict(zip(distinct, _run(sandbox, distinct, domain.limits), strict=True))
        for rollout_id, program in batch:
            answer = answers[program]
            results[rollout_id] = Execution(
                rollout_id, answer.status, answer.returns, answer.stdout, answer.stderr, answer.isolation, answer.reason
            )
    nothing = ExecutionStatus.NOTHING
    return [results.get(rollout.rollout_id) or Execution(rollout.rollout_id, nothing) for rollout in rollouts]


def _run(sandbox: Sandbox, programs: list[ProgramRequest], limits: Limits) -> list[ProgramResult]:
    """No result is left as INFRA: it would be committed, and stay.

    A program that met a fault is run once more beside a canary. When the canary fails too, the fault is ours:
    SandboxFault, and the task tries the shard again. When only the program fails again, it is the program's doing.
    """
    results = sandbox.run_programs(programs, limits) if programs else []
    for number, result in enumerate(results):
        if result.status is not ExecutionStatus.INFRA:
            continue
        again, canary = (sandbox.run_programs([program], limits)[0] for program in (programs[number], CANARY))
        if canary.status is not ExecutionStatus.OK:
            raise SandboxFault(f"the sandbox fails on a program that only adds 1: {canary.status}, {canary.reason}")
        if again.status is ExecutionStatus.INFRA:
            reason = f"crashes_sandbox: twice, while a canary passed ({again.reason})"
            again = replace(again, status=ExecutionStatus.POLICY, reason=reason)
        results[number] = again
    return results
