"""The README's example domain works as it stands there."""

import re
from pathlib import Path
from typing import Any

from posttrain_core.domains.protocol import Domain
from posttrain_core.records import Execution, ExecutionStatus, FinishReason, Outcome, Purpose, Rollout, Split

README = (Path(__file__).parents[1] / "README.md").read_text()


def answered(problem_id: str, text: str) -> Rollout:
    return Rollout(
        "r", "g", problem_id, "numbers", Purpose.TRAIN, 0, 0, 0, (), (1,), (2,), (0.0,), (1,),
        FinishReason.STOP, 1, 1, text, Outcome.SCORED,
    )  # fmt: skip


def test_example_domain() -> None:
    (source,) = re.findall(r"```python\n(# posttrain_core/domains/reverse.py.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(source, names)
    domain: Domain = names["ReverseDomain"]("numbers", None)
    problems = {split: [domain.problem(split, index) for index in range(domain.num_problems(split))] for split in Split}
    ids = [{problem.id for problem in problems[split]} for split in Split]
    assert [len(part) for part in ids] == [800, 200]
    assert not ids[0] & ids[1]
    problem, nothing = problems[Split.TRAIN][0], Execution("r", ExecutionStatus.NOTHING)
    assert problem.prompt[0].content == "Reverse 1001"
    for text, reward in (("1001\n", 1.0), ("", 0.0), ("1001 or 1010", 0.0)):
        assert domain.verify(problem, answered(problem.id, text), nothing).reward == reward


def test_files_that_the_readme_names_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
