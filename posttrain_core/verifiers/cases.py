"""Compare what a program returned, case by case, with what was expected.

A case passes when its value is the expected JSON value of exactly the same types: `True` is not `1`, `1.0` is not `1`,
and a number that is not finite equals nothing. A rollout passes when the program ended by itself and every expected
case was reported exactly once and passed; anything else is reward 0.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain_core.records import CaseReturn, Execution, ExecutionStatus, Outcome, Rollout, Verdict

MAX_VALUE_CHARACTERS = 65536
_UNREADABLE = object()


def fingerprint() -> Mapping[str, Any]:
    return {"comparison": "exact-types", "cases": "all-once", "version": 1}


def verify(rollout: Rollout, execution: Execution, expected: Sequence[Any]) -> Verdict:
    """The verdict on one execution; case i of `expected` has the id str(i), as in `ProgramRequest`."""
    if rollout.outcome is not Outcome.SCORED:
        return _verdict(rollout, rollout.outcome, 0.0, {"reason": rollout.reason})
    if execution.status is ExecutionStatus.INFRA:
        return _verdict(rollout, Outcome.INFRA_FAILED, 0.0, {"reason": execution.reason})
    num_passed = sum(_passed(execution.returns, str(index), value) for index, value in enumerate(expected))
    flags, reason = _irregularities(execution, len(expected))
    passed = not flags and execution.status is ExecutionStatus.OK and num_passed == len(expected) > 0
    evidence = {"status": str(execution.status), "passed": num_passed, "expected": len(expected), "reason": reason}
    share = num_passed / len(expected) if expected else 0.0
    return _verdict(rollout, Outcome.SCORED, float(passed), evidence, flags, {"cases": share})


def same_value(text: str, expected: Any) -> bool:
    """Whether `text` is JSON for `expected`, types included."""
    value = _read(text)
    return value is not _UNREADABLE and _equal(value, expected)


def _irregularities(execution: Execution, num_expected: int) -> tuple[tuple[str, ...], str]:
    """Flags, and the reason for people, where the execution is not one complete report of a program that loaded."""
    counts = Counter(case.case_id for case in execution.returns)
    wanted = {str(index) for index in range(num_expected)}
    if execution.status is ExecutionStatus.NOTHING:
        return ("invalid",), execution.reason or "the answer is empty or too long: nothing to run"
    if counts.keys() - wanted or any(count > 1 for count in counts.values()):
        return ("forged_cases",), "cases were reported twice, or ones that were not asked for"
    if execution.status is ExecutionStatus.POLICY:
        flag = "crashes_sandbox" if execution.reason.startswith("crashes_sandbox") else "policy"
        return (flag,), execution.reason
    if execution.status is ExecutionStatus.RUNTIME_ERROR and not counts:
        return ("invalid",), execution.reason or "the program did not load, or ended before its first case"
    if execution.status in (ExecutionStatus.OK, ExecutionStatus.RUNTIME_ERROR) and counts.keys() != wanted:
        return ("incomplete",), execution.reason or f"{len(counts)} of {num_expected} cases were reported"
    return (), execution.reason


def _passed(returns: Sequence[CaseReturn], case_id: str, expected: Any) -> bool:
    found = [case for case in returns if case.case_id == case_id]
    return len(found) == 1 and found[0].ok and same_value(found[0].value, expected)


def _read(text: str) -> Any:
    if len(text) > MAX_VALUE_CHARACTERS:
        return _UNREADABLE
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _UNREADABLE


def _equal(value: Any, expected: Any) -> bool:
    if type(value) is not type(expected):
        return False
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(_equal(value[key], expected[key]) for key in value)
    if isinstance(value, float):
        return math.isfinite(value) and value == expected
    return bool(value == expected)


def _verdict(
    rollout: Rollout,
    outcome: Outcome,
    reward: float,
    evidence: Mapping[str, Any],
    flags: tuple[str, ...] = (),
    breakdown: Mapping[str, float] | None = None,
) -> Verdict:
    return Verdict(rollout.rollout_id, outcome, reward, breakdown or {}, json.dumps(evidence, sort_keys=True), flags)
