"""Commands that look at runs: what they read is said, and two policies are compared."""

import json
import re
from pathlib import Path

from flows.bench_queries import QUERIES, measure_query
from tests.cli.conftest import Command


def test_what_was_read_is_said_on_standard_error(posttrain: Command) -> None:
    for arguments in (
        ("sql", "select count(*) from rollouts", "--json"),
        ("rollouts", "--limit", "1"),
        ("show", "i00001.p0001.r01"),
        ("diff", "r@0", "r@4"),
    ):
        code, _, error = posttrain(*arguments)
        assert code == 0
        assert re.fullmatch(r"read \d+\.\d (K|M)iB in \d+ requests\n", error)


def test_diff(posttrain: Command) -> None:
    code, output, _ = posttrain("diff", "r@0", "r@4", "--limit", "2")
    assert code == 0
    for part in ("A: run r, version 0", "B: run r, version 4", "pass rate (logic) ", "at 95 %, paired over 6 problems"):
        assert part in output
    found = json.loads(posttrain("diff", "r", "r", "--json")[1])
    assert (found["version_a"], found["version_b"], found["differences"][0]["difference"]) == (4, 4, 0)
    code, _, error = posttrain("diff", "r@x", "r")
    assert (code, "r@40" in error) == (2, True)


def test_queries_are_measured(finished_run: Path) -> None:
    title, query = list(QUERIES.items())[1]
    found = measure_query(str(finished_run), "r", title, query, 1)
    assert found.num_rows == 4
    assert 0 < found.seconds < found.cold_seconds
    assert found.num_bytes > 0
