"""The committed problem sets are what their README says and what the generators still make."""

import hashlib
import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from posttrain_core.domains.problem_sets import read_sets, text_of

DATA = Path(__file__).parents[2] / "data"
LISTED = dict(re.findall(r"^\| `([^`]+)` .* `([0-9a-f]{64})` \|$", (DATA / "README.md").read_text(), re.MULTILINE))


def test_the_readme_lists_every_set_and_nothing_else() -> None:
    files = {str(path.relative_to(DATA)) for path in DATA.rglob("*.jsonl")}
    assert files == set(LISTED) == set(read_sets(DATA))


@pytest.mark.parametrize("file", sorted(LISTED))
def test_the_hash_is_the_listed_one(file: str) -> None:
    assert hashlib.sha256((DATA / file).read_bytes()).hexdigest() == LISTED[file]


@pytest.mark.parametrize("file", sorted(LISTED))
def test_the_generator_still_makes_the_same_problems(file: str) -> None:
    problem_set = read_sets(DATA)[file]
    if problem_set.domain.type == "reasoning_gym":
        assert f"reasoning-gym) {version('reasoning-gym')}" in (DATA / "README.md").read_text()
    assert text_of(problem_set) == (DATA / file).read_text()


@pytest.mark.parametrize("file", sorted(LISTED))
def test_each_row_is_a_held_out_problem_of_its_own(file: str) -> None:
    rows = [json.loads(line) for line in (DATA / file).read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) >= 24
    assert {row["split"] for row in rows} == {"held_out"}
