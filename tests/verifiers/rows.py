"""Rollouts and executions as the stages would hand them over, with only what a verifier looks at."""

import json
from collections.abc import Sequence
from typing import Any

from posttrain_core.records import CaseReturn, Execution, ExecutionStatus, FinishReason, Outcome, Purpose, Rollout


def rollout_of(text: str, outcome: Outcome = Outcome.SCORED) -> Rollout:
    return Rollout(
        rollout_id="r",
        group_id="g",
        problem_id="p",
        domain="d",
        purpose=Purpose.TRAIN,
        sample_index=0,
        seed=0,
        policy_version=0,
        messages=(),
        prompt_ids=(),
        response_ids=(),
        sampler_logprobs=(),
        loss_mask=(),
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=0,
        num_response_tokens=0,
        text=text,
        outcome=outcome,
        reason="cut" if outcome is Outcome.TRUNCATED else "",
    )


def execution_of(values: Sequence[Any], status: ExecutionStatus = ExecutionStatus.OK) -> Execution:
    returns = tuple(CaseReturn(str(index), True, json.dumps(value)) for index, value in enumerate(values))
    return Execution("r", status, returns)
