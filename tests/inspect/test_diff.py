"""Two policies on the same problems."""

from pathlib import Path

import pytest

from posttrain_core.errors import ConfigError
from posttrain_core.inspect import Run
from posttrain_core.inspect.diff import diff
from posttrain_core.inspect.report import report


def test_versions_of_one_run_differ_as_its_report_says(run: Run) -> None:
    found = diff(run, run, 0, 4)
    passed = {row.domain: row for row in found.differences if row.measure == "pass_rate"}
    for row in report(run).comparisons:
        mine = passed[row.domain]
        assert (mine.num_problems, mine.a, mine.b) == (row.num_problems, row.before, row.after)
        assert (mine.difference, mine.low, mine.high) == (row.difference, row.low, row.high)
    assert passed.keys() == {"", "logic", "program"}


def test_problems_are_paired_with_their_rewards(run: Run) -> None:
    found = diff(run, run, 0, 2)
    query = "select avg(reward) r, count(*) n from rollouts where purpose = 'eval' and iteration = ? and problem_id = ?"
    assert len(found.pairs) == 6
    for pair in found.pairs:
        for attempts, version in ((pair.a, 0), (pair.b, 2)):
            row = run.sql(query, version, pair.problem_id).to_pylist()[0]
            assert (attempts.reward, attempts.num_rollouts) == (pytest.approx(row["r"]), row["n"])
    gains = [pair.gain for pair in found.pairs]
    assert gains == sorted(gains)
    assert [pair.gain for pair in found.gains] == sorted((gain for gain in gains if gain > 0), reverse=True)
    assert [pair.gain for pair in found.losses] == sorted(gain for gain in gains if gain < 0)


def test_the_last_common_evaluation_is_taken(made_up_store: Path) -> None:
    short, long = (Run(str(made_up_store), name) for name in ("short", "long"))
    found = diff(short, long)
    assert (found.version_a, found.version_b) == (12, 12)
    assert (found.num_only_a, found.num_only_b, len(found.pairs)) == (0, 0, 4)
    found = diff(short, long, version_b=20)
    assert (found.version_a, found.version_b) == (12, 20)


def test_what_cannot_be_compared_is_said(run: Run, made_up_store: Path) -> None:
    short = Run(str(made_up_store), "short")
    with pytest.raises(ConfigError, match="no evaluation of version 7; evaluated are 0, 6, 12"):
        diff(short, short, 7)
    with pytest.raises(ConfigError, match="none in common"):
        diff(run, short)
