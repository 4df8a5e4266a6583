"""update: verdicts become samples with advantages, and the learner takes one iteration's step."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from posttrain_core import layout
from posttrain_core.errors import LearnerFault, RunConflict, StageIncomplete
from posttrain_core.layout import Scope
from posttrain_core.learner.advantages import advantages, overlong_penalty
from posttrain_core.learner.presets import resolve
from posttrain_core.manifest import (
    Fingerprint,
    Manifest,
    ObjectRef,
    commit_folder,
    commit_table,
    find_table,
    read_table,
)
from posttrain_core.records import Outcome, PlanRow, Purpose, Rollout, Sample, Verdict
from posttrain_core.stages.context import Run, new_attempt
from posttrain_core.stages.session import LearnerSession

R = TypeVar("R")

_SECTIONS = ("seed", "model", "sft", "plan", "algorithm", "learner")


def update(run: Run, scope: Scope, session: LearnerSession) -> Manifest:
    """Commit samples, metrics and, when one is due, the checkpoint, all by one manifest."""
    inputs = {"verify": run.manifest(scope, "verify").digest, "policy": run.policy(scope.iteration).digest}
    expected = run.fingerprint(inputs, *_SECTIONS)
    found = run.find(scope, "update", expected)
    if found is not None:
        return found
    with run.timed(scope, "update") as telemetry:
        try:
            table, samples = _committed_samples(run, scope, session, expected)
            telemetry["samples"] = len(samples)
            metrics = session.step(scope.iteration, samples)
            prefix, checkpoint = _checkpoint(run, scope, session)
        except LearnerFault as error:
            session.forget()
            run.progress.note(f"{scope}: the learner failed and is brought up again from the store: {error}"[:300])
            raise
    notes = {"checkpoint": prefix} if checkpoint else {}
    return run.commit(scope, "update", expected, (table, *checkpoint), metrics, notes)


def _committed_samples(
    run: Run, scope: Scope, session: LearnerSession, expected: Fingerprint
) -> tuple[ObjectRef, list[Sample]]:
    """Committed before the step, so that an update done again learns from the very same ones."""
    key = layout.table(run.name, "samples", scope, 0)
    found = find_table(run.store, key, expected)
    if found is not None:
        return found, read_table(run.store, found, Sample)
    plan = _rows(run, scope, "plan", PlanRow)
    rollouts, verdicts = _rows(run, scope, "generate", Rollout), _rows(run, scope, "verify", Verdict)
    samples = list(make_samples(run, plan, rollouts, verdicts))
    _enough(run, scope, verdicts, len(samples))
    samples = session.with_reference(scope.iteration, samples)
    return commit_table(run.store, key, "samples", samples, expected), samples


def make_samples(
    run: Run, plan: Sequence[PlanRow], rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]
) -> Iterator[Sample]:
    """One sample per rollout that may be learned from; the others shape no statistic."""
    algorithm = resolve(run.config.algorithm)
    strangers = sorted({row.purpose for row in rollouts} - {Purpose.TRAIN})
    if strangers:
        raise RunConflict(f"update refuses rollouts made for {', '.join(strangers)}: only train rows are learned from")
    usable = [_usable(run, rollout, verdict) for rollout, verdict in zip(rollouts, verdicts, strict=True)]
    rewards = [
        verdict.reward + overlong_penalty(rollout.num_response_tokens, row.max_new_tokens, algorithm.overlong_buffer)
        for row, rollout, verdict in zip(plan, rollouts, verdicts, strict=True)
    ]
    values = advantages(rewards, [rollout.group_id for rollout in rollouts], usable, algorithm.advantage)
    for row, rollout, keep, reward, advantage in zip(plan, rollouts, usable, rewards, values, strict=True):
        if keep:
            yield _sample(rollout, reward, advantage, row.temperature)


def _usable(run: Run, rollout: Rollout, verdict: Verdict) -> bool:
    learned = {Outcome.SCORED}
    if run.config.algorithm.truncated == "zero":
        learned.add(Outcome.TRUNCATED)
    return verdict.outcome in learned and any(rollout.loss_mask)


def _sample(rollout: Rollout, reward: float, advantage: float, temperature: float) -> Sample:
    padding = (0,) * len(rollout.prompt_ids)
    return Sample(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        domain=rollout.domain,
        segment=0,
        input_ids=rollout.prompt_ids + rollout.response_ids,
        loss_mask=padding + rollout.loss_mask,
        sampler_logprobs=(0.0,) * len(padding) + rollout.sampler_logprobs,
        reward=reward,
        advantage=advantage,
        temperature=temperature,
    )


def _rows(run: Run, scope: Scope, stage: str, record: type[R]) -> list[R]:
    return [row for ref in run.manifest(scope, stage).objects for row in read_table(run.store, ref, record)]


def _enough(run: Run, scope: Scope, verdicts: Sequence[Verdict], num_samples: int) -> None:
    share = num_samples / len(verdicts) if verdicts else 0.0
    if num_samples and share >= run.config.plan.min_scored_share:
        return
    counts = {str(outcome): sum(verdict.outcome is outcome for verdict in verdicts) for outcome in Outcome}
    reasons = {json.loads(verdict.evidence).get("reason", "") for verdict in verdicts} - {""}
    raise StageIncomplete(
        f"{scope} of run {run.name!r}: only {num_samples} of {len(verdicts)} rollouts can be learned from "
        f"({counts}); plan.min_scored_share is {run.config.plan.min_scored_share}. Reasons: {sorted(reasons)[:3]}"
    )


def _checkpoint(run: Run, scope: Scope, session: LearnerSession) -> tuple[str, list[ObjectRef]]:
    """Where the checkpoint lies and its objects; none when no checkpoint is due."""
    prefix = layout.checkpoint(run.name, scope.iteration, new_attempt())
    if (scope.iteration + 1) % run.config.checkpoint.every:
        return prefix, []
    with tempfile.TemporaryDirectory(dir=run.scratch) as folder:
        session.learner.save_checkpoint(Path(folder))
        return prefix, commit_folder(run.store, prefix, Path(folder), semantic=False)
