"""The records that pass between stages: frozen, typed, one row each.

A worked example, one rollout of the `program` domain from plan to sample:

    Problem    id="program/3f2a", prompt=[Message("user", "f(0)=3 f(1)=5 f(2)=7")], payload={"inputs": [5, 9]},
               hidden={"outputs": [13, 21]}
    PlanRow    rollout_id="i00004.p0007.r02", group_id="i00004.p0007", seed=83.., max_new_tokens=24, temperature=1.0
    Rollout    prompt_ids=[1, 44, ..] (P tokens), response_ids=[9, 31, .., 2] (T tokens),
               sampler_logprobs (T floats), loss_mask (T ints), finish_reason="stop", text="2*x+3"
    Execution  status="ok", returns=(CaseReturn("0", ok=True, value="13"), CaseReturn("1", ok=True, value="21"))
    Verdict    outcome="scored", reward=1.0, breakdown={"cases": 1.0}
    Sample     input_ids=prompt+response (P+T), loss_mask=0*P + mask, sampler_logprobs=0.0*P + logprobs, advantage=0.87

Nothing here differs between two runs of the same thing: no times, hosts, run ids or nonces.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

PASS_REWARD = 1.0  # a rollout passes when its reward is at least this


class Outcome(StrEnum):
    """What became of a rollout.

    SCORED includes all that the policy is responsible for; TRUNCATED (a limit cut it) counts as reward 0 or is masked,
    by `algorithm.truncated`; the other two are our fault: masked, never 0, and counted.
    """

    SCORED = "scored"
    TRUNCATED = "truncated"
    INFRA_FAILED = "infra_failed"
    UNSCORABLE = "unscorable"


class Purpose(StrEnum):
    """Why a rollout is made. The update stage refuses anything but TRAIN."""

    TRAIN = "train"
    EVAL = "eval"
    AUDIT = "audit"


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


class FinishReason(StrEnum):
    STOP = "stop"  # the policy ended its turn
    STOP_RULE = "stop_rule"  # the text came to one of the domain's stop strings, which is kept
    REPETITION = "repetition"  # cut: the last tokens repeat one period (`plan.repetition`)
    LENGTH = "length"  # max_new_tokens reached
    REFUSED = "refused"  # never sent: the prompt does not fit the context


class ExecutionStatus(StrEnum):
    """How an execution ended, decided from kernel evidence and our own kill record, never from text."""

    OK = "ok"
    RUNTIME_ERROR = "runtime_error"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"
    PROCESS_LIMIT = "process_limit"
    POLICY = "policy"  # the work product broke a rule of the sandbox
    INFRA = "infra"  # our fault
    NOTHING = "nothing"  # the domain has nothing to run, or the rollout produced nothing to run


@dataclass(frozen=True)
class Message:
    """One chat message. `tool_calls` is a JSON array as text ("" where there are none)."""

    role: str
    content: str
    tool_calls: str = ""
    tool_call_id: str = ""
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """One item to solve.

    `payload` may enter a sandbox (inputs); `hidden` never does (expected values, references).
    Both hold JSON values only. `id` is unique over all domains of a run: "<domain>/<item>".
    """

    id: str
    domain: str
    split: Split
    prompt: tuple[Message, ...]
    payload: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRow:
    """One rollout to be made. `problem` is the whole problem as JSON, so a reward can be re-derived from the store."""

    rollout_id: str
    group_id: str
    problem_id: str
    domain: str
    purpose: Purpose
    sample_index: int
    seed: int  # 63 bits
    policy_version: int
    max_new_tokens: int
    temperature: float
    stop: tuple[str, ...]  # the domain's stop strings
    problem: str


@dataclass(frozen=True)
class Rollout:
    """One attempt. T response tokens; `loss_mask` is 0 on every token that the policy did not emit.

    `outcome` is UNSCORABLE (with `reason`) when no request was sent, TRUNCATED when a limit cut it, else SCORED.
    """

    rollout_id: str
    group_id: str
    problem_id: str
    domain: str
    purpose: Purpose
    sample_index: int
    seed: int
    policy_version: int
    messages: tuple[Message, ...]  # prompt and response turns
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_response_tokens: int
    text: str  # the last response turn, decoded, special tokens removed
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True)
class CaseReturn:
    """What one case returned. `value` is canonical JSON of an exact builtin type ("" when `ok` is false)."""

    case_id: str
    ok: bool
    value: str = ""
    error: str = ""


@dataclass(frozen=True)
class Execution:
    """What a sandbox observed. `isolation` says what was applied ("namespaces", "unisolated", "none")."""

    rollout_id: str
    status: ExecutionStatus
    returns: tuple[CaseReturn, ...] = ()
    stdout: str = ""
    stderr: str = ""
    isolation: str = "none"
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """A verifier's typed outcome. `reward` is finite, and 0.0 unless `outcome` is SCORED."""

    rollout_id: str
    outcome: Outcome
    reward: float
    breakdown: Mapping[str, float] = field(default_factory=dict)
    evidence: str = "{}"  # JSON object
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One training row. P + T tokens; the first P have mask 0. `advantage` applies to every unmasked token."""

    rollout_id: str
    group_id: str
    domain: str
    segment: int
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]  # 0.0 where the mask is 0
    reward: float
    advantage: float
    temperature: float
    reference_logprobs: tuple[
        float, ...
    ] = ()  # as sampler_logprobs; () when no divergence from a reference policy is asked for
