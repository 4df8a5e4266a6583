"""verify: compare what was recorded with what was expected. Candidate bytes never run here."""

import json
import math

from posttrain_core import layout
from posttrain_core.errors import VerifierFault
from posttrain_core.layout import Scope
from posttrain_core.manifest import (
    Manifest,
    ObjectRef,
    commit_table,
    find_table,
    read_table,
)
from posttrain_core.records import PASS_REWARD, Execution, ExecutionStatus, Outcome, PlanRow, Rollout, Verdict
from posttrain_core.schema import parse_problem
from posttrain_core.stages.context import Run


def verify_shard(run: Run, scope: Scope, shard: int, rollouts: ObjectRef, executions: ObjectRef) -> ObjectRef:
    """Commit one shard of verdicts, or adopt the one that is there."""
    plan = run.manifest(scope, "plan").objects[shard]
    inputs = {"plan": plan.digest, "rollouts": rollouts.digest, "executions": executions.digest}
    expected = run.fingerprint(inputs | {"verifiers": run.verdict_set}, "domains")
    key = layout.verdicts(run.name, run.verdict_set, scope, shard)
    found = find_table(run.store, key, expected)
    if found is not None:
        return found
    rows = read_table(run.store, rollouts, Rollout)
    seen = read_table(run.store, executions, Execution)
    problems = {row.rollout_id: row.problem for row in read_table(run.store, plan, PlanRow)}
    with run.timed(scope, "verify", shard, rollouts=len(rows)):
        verdicts = [
            _verdict(run, rollout, execution, problems[rollout.rollout_id])
            for rollout, execution in zip(rows, seen, strict=True)
        ]
    return commit_table(run.store, key, "verdicts", verdicts, expected)


def commit_verify(run: Run, scope: Scope, shards: list[ObjectRef]) -> Manifest:
    """The stage's manifest, once every shard is there, with the counts of its verdicts."""
    inputs = {"execute": run.manifest(scope, "execute").digest, "verifiers": run.verdict_set}
    expected = run.fingerprint(inputs, "domains")
    found = run.find(scope, "verify", expected)
    if found is not None:
        return found
    verdicts = [verdict for ref in shards for verdict in read_table(run.store, ref, Verdict)]
    return run.commit(scope, "verify", expected, shards, summary(verdicts))


def summary(verdicts: list[Verdict]) -> dict[str, float]:
    """Counts by outcome; mean reward and pass rate over rollouts that were judged (scored or truncated)."""
    judged = [verdict for verdict in verdicts if verdict.outcome in (Outcome.SCORED, Outcome.TRUNCATED)]
    counts = {str(outcome): float(sum(v.outcome is outcome for v in verdicts)) for outcome in Outcome}
    if judged:
        counts["reward_mean"] = sum(verdict.reward for verdict in judged) / len(judged)
        counts["pass_rate"] = sum(verdict.reward >= PASS_REWARD for verdict in judged) / len(judged)
    return counts


def _verdict(run: Run, rollout: Rollout, execution: Execution, problem: str) -> Verdict:
    if rollout.outcome is not Outcome.SCORED:
        return Verdict(rollout.rollout_id, rollout.outcome, 0.0, evidence=json.dumps({"reason": rollout.reason}))
    if execution.status is ExecutionStatus.INFRA:
        evidence = json.dumps({"reason": execution.reason})
        return Verdict(rollout.rollout_id, Outcome.INFRA_FAILED, 0.0, evidence=evidence)
    verdict = run.domains[rollout.domain].verify(parse_problem(problem), rollout, execution)
    if not math.isfinite(verdict.reward) or not all(map(math.isfinite, verdict.breakdown.values())):
        raise VerifierFault(
            f"domain {rollout.domain!r}: the verifier returned a non-finite reward for rollout {rollout.rollout_id}: "
            f"{verdict.reward!r} {dict(verdict.breakdown)!r}"
        )
    return verdict
