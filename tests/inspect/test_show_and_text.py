"""A rollout as text, and nothing in it that a terminal would act upon."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain_core.errors import ConfigError
from posttrain_core.inspect import Run
from posttrain_core.inspect.query import sql
from posttrain_core.inspect.show import rollout_record, show
from posttrain_core.inspect.text import quoted, visible


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é 漢 🙂", "plain é 漢 🙂"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\rb\nc\td", "a\\rb\\nc\\td"),
        ("\x9b31m\x00\x7f", "\\x9b31m\\x00\\x7f"),
        ("\u202eevil\u2066\u200f\u061c", "\\u202eevil\\u2066\\u200f\\u061c"),
        ("\u200b\ufeff\u2028\u2029", "\\u200b\\ufeff\\u2028\\u2029"),
        ("\U000e0041\ud800\ue000", "\\U000e0041\\ud800\\ue000"),
    ],
)
def test_what_is_not_seen_is_shown_by_its_escape(text: str, expected: str) -> None:
    assert visible(text) == expected


@given(st.text(st.characters()))
def test_nothing_hidden_is_left(text: str) -> None:
    shown = visible(text)
    assert not any(unicodedata.category(char)[0] == "C" or char in "\u2028\u2029" for char in shown)
    for line in quoted(text):
        assert line.startswith("  | ")
        assert visible(line, keep="\t") == line


def test_show_tells_everything_and_escapes_it(run: Run) -> None:
    rollout_id = one(run, "text like '%red%' and domain = 'program'")
    shown = show(run, rollout_id)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "  | \\x1b[31mred\\u202e" in shown.splitlines()
    for part in (f"rollout {rollout_id}", "[user]", "[assistant]", "runtime_error", "scored, reward 0", "expected: {"):
        assert part in shown
    row = sql(run, "select * from rollouts where rollout_id = ?", [rollout_id]).to_pylist()[0]
    assert row["problem_id"] in shown
    tokens = shown.partition("response tokens\n")[2].splitlines()[1:]
    assert [int(line.split()[1]) for line in tokens] == row["response_ids"]
    assert [float(line.split()[2]) for line in tokens] == pytest.approx(row["sampler_logprobs"], abs=1e-4)


def test_show_has_each_case_and_the_sample(run: Run) -> None:
    rollout_id = one(run, "text = 'x+1' and domain = 'program' and purpose = 'train'")
    shown = show(run, rollout_id, tokens=False)
    assert "log-prob" not in shown
    cases = sql(run, "select unnest(returns) r from executions where rollout_id = ?", [rollout_id]).to_pylist()
    assert len(cases) == 8
    for case in cases:
        assert f"  case {case['r']['case_id']} returned {case['r']['value']}" in shown
    advantage = sql(run, "select advantage from samples where rollout_id = ?", [rollout_id]).to_pylist()[0]["advantage"]
    assert f"advantage {advantage:+.4f}" in shown


def test_an_evaluated_rollout_is_not_learned_from(run: Run) -> None:
    rollout_id = one(run, "purpose = 'eval' and reward = 1")
    assert "scored, reward 1" in show(run, rollout_id)
    record = rollout_record(run, rollout_id)
    assert record["samples"] is None
    assert record["verdicts"]["reward"] == 1
    assert record["verdicts"]["breakdown"] == {"score": 1.0}
    assert record["rollouts"]["rollout_id"] == record["executions"]["rollout_id"] == rollout_id


@pytest.mark.parametrize("wrong", ["i00001.p0003.r9", "i0001.p0003.r01", "1.p0003.r01"])
def test_an_unknown_rollout_is_answered_with_the_nearest(wrong: str, run: Run) -> None:
    with pytest.raises(ConfigError, match=r"no rollout '.*nearest are .*i00001\.p0003\.r0"):
        show(run, wrong)
    with pytest.raises(ConfigError, match="no rollout"):
        rollout_record(run, wrong)


def one(run: Run, condition: str) -> str:
    query = f"select rollout_id from rollouts where {condition} order by rollout_id limit 1"
    return str(sql(run, query).to_pylist()[0]["rollout_id"])
