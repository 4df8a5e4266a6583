"""What the page of one rollout shows."""

import json
from dataclasses import dataclass
from math import exp
from typing import Any

from posttrain_core.errors import ConfigError
from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.show import find, token_texts
from posttrain_core.records import Execution, PlanRow, Problem, Rollout, Sample, Verdict
from posttrain_core.schema import parse_problem

# Chances that the sampler gave a token, from one colour to the next; the least likely have the last one.
CHANCES = (0.9, 0.5, 0.1, 0.01)
_LINE = 100  # characters of JSON up to which it stays on one line


@dataclass(frozen=True)
class Token:
    """`level` is its colour: 0 (as good as certain) to len(CHANCES)."""

    place: int
    id: int
    text: str
    logprob: float
    learned: bool
    level: int

    @property
    def chance(self) -> float:
        return exp(min(0.0, self.logprob))


@dataclass(frozen=True)
class RolloutPage:
    """None where a stage is not committed yet. `siblings` are the rows of its group, itself among them."""

    rollout: Rollout
    plan: PlanRow | None
    problem: Problem | None
    execution: Execution | None
    verdict: Verdict | None
    sample: Sample | None
    evidence: dict[str, Any]
    tokens: list[Token]
    siblings: list[dict[str, Any]]


def rollout_page(run: Run, rollout_id: str) -> RolloutPage:
    """ConfigError when there is no such rollout."""
    rollout = find(run, rollout_id, Rollout)
    if rollout is None:
        raise ConfigError(f"run {run.name!r} has no rollout {rollout_id!r}")
    plan, verdict = find(run, rollout_id, PlanRow), find(run, rollout_id, Verdict)
    return RolloutPage(
        rollout=rollout,
        plan=plan,
        problem=parse_problem(plan.problem) if plan else None,
        execution=find(run, rollout_id, Execution),
        verdict=verdict,
        sample=find(run, rollout_id, Sample),
        evidence=json.loads(verdict.evidence) if verdict else {},
        tokens=_tokens(run, rollout),
        siblings=_siblings(run, rollout),
    )


def tool_calls(text: str) -> list[dict[str, str]]:
    """The calls of a message, each with its name and its arguments as text; what has another form as it stands."""
    calls: Any = json.loads(text) if text else []
    return [_call(call) for call in calls]


def as_text(value: Any) -> str:
    """A value of a payload or of evidence."""
    if isinstance(value, str):
        return value
    short = json.dumps(value, ensure_ascii=False)
    return short if len(short) <= _LINE else json.dumps(value, ensure_ascii=False, indent=1)


def _call(call: Any) -> dict[str, str]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return {"name": "", "arguments": as_text(call)}
    return {"name": function["name"], "arguments": as_text(function.get("arguments", ""))}


def _tokens(run: Run, rollout: Rollout) -> list[Token]:
    texts = token_texts(run, rollout.response_ids)
    rows = zip(rollout.response_ids, texts, rollout.sampler_logprobs, rollout.loss_mask, strict=True)
    return [
        Token(place, token, text, logprob, bool(mask), _level(logprob))
        for place, (token, text, logprob, mask) in enumerate(rows)
    ]


def _level(logprob: float) -> int:
    return sum(exp(min(0.0, logprob)) < chance for chance in CHANCES)


def _siblings(run: Run, rollout: Rollout) -> list[dict[str, Any]]:
    columns = ("rollout_id", "sample_index", "outcome", "reward", "num_response_tokens", "text")
    iteration = int(rollout.policy_version)
    rows = run.rollouts(*columns, purpose=rollout.purpose, iteration=iteration, group_id=rollout.group_id)
    return sorted(rows.to_pylist(), key=lambda row: int(row["sample_index"]))
