"""generate: a sampler turns plan rows into rollouts."""

import time

from posttrain_core import layout
from posttrain_core.layout import Scope
from posttrain_core.manifest import (
    Manifest,
    ObjectRef,
    commit_table,
    find_table,
    read_table,
)
from posttrain_core.records import FinishReason, Message, Outcome, PlanRow, Rollout
from posttrain_core.sampling.protocol import Completion, Sampler, SampleRequest
from posttrain_core.schema import parse_problem
from posttrain_core.stages.context import Run
from posttrain_core.stages.journal import Journal


def generate_shard(run: Run, scope: Scope, shard: int, sampler: Sampler) -> ObjectRef:
    """Commit one shard of rollouts, or adopt the one that is there."""
    plan, policy = run.manifest(scope, "plan").objects[shard], run.policy(scope.iteration)
    expected = run.fingerprint({"plan": plan.digest, "policy": policy.digest}, "sampler", "model")
    key = layout.table(run.name, "rollouts", scope, shard)
    found = find_table(run.store, key, expected)
    if found is not None:
        return found
    rows = read_table(run.store, plan, PlanRow)
    with Journal(run, scope, shard, expected) as journal, run.timed(scope, "generate", shard) as telemetry:
        started = time.monotonic()
        sampler.load_policy(scope.iteration, run.policy_folder(policy), run.probes(policy))
        telemetry["load_seconds"] = time.monotonic() - started  # of the policy: other shards wait for the first one's
        rollouts = make_rollouts(run, scope, shard, sampler, rows, journal)
        telemetry["rollouts"] = len(rollouts)
        telemetry["tokens"] = sum(rollout.num_response_tokens for rollout in rollouts)
        telemetry["journalled"] = len(journal.finished)
    table = commit_table(run.store, key, "rollouts", rollouts, expected)
    journal.clear()
    return table


def commit_generate(run: Run, scope: Scope, shards: list[ObjectRef]) -> Manifest:
    """The stage's manifest, once every shard is there."""
    expected = run.fingerprint({"plan": run.manifest(scope, "plan").digest}, "sampler", "model")
    return run.find(scope, "generate", expected) or run.commit(scope, "generate", expected, shards)


def make_rollouts(
    run: Run, scope: Scope, shard: int, sampler: Sampler, rows: list[PlanRow], journal: Journal
) -> list[Rollout]:
    """One rollout per row, in order. Those in the journal are not made again; prompts that do not fit are never sent:
    `unscorable`."""
    made = dict(journal.finished)
    prompts = {row.problem: sampler.encode(parse_problem(row.problem).prompt) for row in rows}
    asked: list[PlanRow] = []
    for row in rows:
        if row.rollout_id in made:
            continue
        if len(prompts[row.problem]) + row.max_new_tokens <= sampler.context_length:
            asked.append(row)
        else:
            refused = Completion((), (), FinishReason.REFUSED)
            made[row.rollout_id] = _rollout(sampler, row, prompts[row.problem], refused)

    def finish(index: int, completion: Completion) -> None:
        row = asked[index]
        made[row.rollout_id] = _rollout(sampler, row, prompts[row.problem], completion)

    def on_done(index: int, completion: Completion) -> None:
        finish(index, completion)
        journal.add(made[asked[index].rollout_id])
        run.progress.advance(f"{scope} rollouts of shard {shard}", len(made), len(rows))

    repetition = run.config.plan.repetition
    requests = [
        SampleRequest(prompts[row.problem], row.seed, row.max_new_tokens, row.temperature, row.stop, repetition)
        for row in asked
    ]
    try:
        completions = sampler.sample(requests, on_done)
    finally:
        run.progress.end(f"{scope} rollouts of shard {shard}")
    for index, completion in enumerate(completions):
        if asked[index].rollout_id not in made:
            finish(index, completion)
    return [made[row.rollout_id] for row in rows]


def _rollout(sampler: Sampler, row: PlanRow, prompt_ids: tuple[int, ...], completion: Completion) -> Rollout:
    text = sampler.decode(completion.response_ids)
    outcome, reason = Outcome.SCORED, ""
    if completion.finish_reason is FinishReason.REFUSED:
        outcome = Outcome.UNSCORABLE
        reason = (
            f"prompt of {len(prompt_ids)} tokens and {row.max_new_tokens} new ones exceed the context "
            f"of {sampler.context_length}"
        )
    elif completion.finish_reason is FinishReason.LENGTH:
        outcome, reason = Outcome.TRUNCATED, f"max_new_tokens ({row.max_new_tokens})"
    elif completion.finish_reason is FinishReason.REPETITION:
        outcome, reason = (
            Outcome.TRUNCATED,
            f"it repeated itself (plan.repetition) after {len(completion.response_ids)} tokens",
        )
    return Rollout(
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        problem_id=row.problem_id,
        domain=row.domain,
        purpose=row.purpose,
        sample_index=row.sample_index,
        seed=row.seed,
        policy_version=row.policy_version,
        messages=(*parse_problem(row.problem).prompt, Message("assistant", text)),
        prompt_ids=prompt_ids,
        response_ids=completion.response_ids,
        sampler_logprobs=completion.logprobs,
        loss_mask=(1,) * len(completion.response_ids),
        finish_reason=completion.finish_reason,
        num_prompt_tokens=len(prompt_ids),
        num_response_tokens=len(completion.response_ids),
        text=text,
        outcome=outcome,
        reason=reason,
    )
