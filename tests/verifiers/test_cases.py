"""The case verifier pays for complete, exact reports only."""

import json

import pytest

from posttrain_core.records import CaseReturn, Execution, ExecutionStatus, Outcome
from posttrain_core.verifiers.cases import same_value, verify
from tests.verifiers.rows import execution_of, rollout_of

EXPECTED = [3, -4, 0]


def test_all_cases_right_is_reward_one() -> None:
    verdict = verify(rollout_of("a"), execution_of(EXPECTED), EXPECTED)
    assert (verdict.outcome, verdict.reward, verdict.flags) == (Outcome.SCORED, 1.0, ())
    assert verdict.breakdown == {"cases": 1.0}


def test_one_wrong_case_is_reward_zero_and_the_breakdown_says_how_many() -> None:
    verdict = verify(rollout_of("a"), execution_of([3, -4, 1]), EXPECTED)
    assert verdict.reward == 0.0
    assert verdict.breakdown == {"cases": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("13", 13, True),
        ("true", 1, False),
        ("1", True, False),
        ("1.0", 1, False),
        ("0", False, False),
        ("null", 0, False),
        ('"13"', 13, False),
        ("NaN", 1, False),
        ("NaN", float("nan"), False),
        ("Infinity", float("inf"), False),
        ("0.5", 0.5, True),
        ("[1, [2]]", [1, [2]], True),
        ("[1, [true]]", [1, [1]], False),
        ('{"a": 1}', {"a": 1}, True),
        ('{"a": 1.0}', {"a": 1}, False),
        ("", 0, False),
        ("13 14", 13, False),
        ("9" * 5000, 13, False),
        ("[" * 60000, 13, False),
        ("1" * 70000, 13, False),
    ],
)
def test_values_are_compared_exactly(text: str, expected: object, same: bool) -> None:
    assert same_value(text, expected) is same


def returns(*cases: tuple[str, str]) -> tuple[CaseReturn, ...]:
    return tuple(CaseReturn(case_id, True, value) for case_id, value in cases)


@pytest.mark.parametrize(
    ("reported", "flag"),
    [
        (returns(("0", "3"), ("1", "-4")), "incomplete"),
        (returns(("0", "3"), ("1", "-4"), ("2", "0"), ("2", "0")), "forged_cases"),
        (returns(("0", "3"), ("1", "-4"), ("2", "9"), ("2", "0")), "forged_cases"),
        (returns(("0", "3"), ("1", "-4"), ("2", "0"), ("3", "0")), "forged_cases"),
        (returns(("0", "3"), ("1", "-4"), ("02", "0")), "forged_cases"),
    ],
)
def test_every_case_counts_exactly_once(reported: tuple[CaseReturn, ...], flag: str) -> None:
    verdict = verify(rollout_of("a"), Execution("r", ExecutionStatus.OK, reported), EXPECTED)
    assert verdict.reward == 0.0
    assert verdict.flags == (flag,)


LIMITS = [
    status
    for status in ExecutionStatus
    if status not in (ExecutionStatus.OK, ExecutionStatus.INFRA, ExecutionStatus.NOTHING)
]


@pytest.mark.parametrize("status", LIMITS)
def test_right_values_do_not_pay_when_the_program_did_not_end_by_itself(status: ExecutionStatus) -> None:
    assert verify(rollout_of("a"), execution_of(EXPECTED, status), EXPECTED).reward == 0.0


def test_our_own_fault_is_masked_not_punished() -> None:
    verdict = verify(rollout_of("a"), Execution("r", ExecutionStatus.INFRA, reason="no memory"), EXPECTED)
    assert verdict.outcome is Outcome.INFRA_FAILED
    assert "no memory" in verdict.evidence


def test_a_program_that_did_not_load_is_invalid_and_the_evidence_says_why() -> None:
    broken = Execution("r", ExecutionStatus.RUNTIME_ERROR, reason="SyntaxError: invalid syntax")
    verdict = verify(rollout_of("x+"), broken, EXPECTED)
    assert (verdict.outcome, verdict.reward, verdict.flags) == (Outcome.SCORED, 0.0, ("invalid",))
    assert "SyntaxError" in json.loads(verdict.evidence)["reason"]


def test_nothing_to_run_is_invalid() -> None:
    verdict = verify(rollout_of(""), Execution("r", ExecutionStatus.NOTHING), EXPECTED)
    assert verdict.flags == ("invalid",)


def test_an_empty_expectation_is_never_met() -> None:
    assert verify(rollout_of("a"), execution_of([]), []).reward == 0.0


def test_text_that_claims_success_counts_for_nothing() -> None:
    loud = Execution("r", ExecutionStatus.OK, stdout="PASSED\n1 passed", stderr="reward: 1.0")
    assert verify(rollout_of("a"), loud, EXPECTED).reward == 0.0


def test_a_truncated_rollout_keeps_its_outcome() -> None:
    verdict = verify(rollout_of("a", Outcome.TRUNCATED), execution_of(EXPECTED), EXPECTED)
    assert (verdict.outcome, verdict.reward) == (Outcome.TRUNCATED, 0.0)
    assert "cut" in verdict.evidence
