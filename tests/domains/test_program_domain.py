"""The program domain: its grammar, its splits, what it takes for an answer, and what it pays for."""

import re

import pytest

from posttrain_core.config import ProgramDomainConfig
from posttrain_core.domains.functions import (
    BEHAVIOUR_INPUTS,
    FAMILIES,
    VISIBLE_INPUTS,
    all_functions,
    behaviour_id,
)
from posttrain_core.domains.program import ProgramDomain, hidden_inputs, source_and_entry
from posttrain_core.domains.registry import make_domain
from posttrain_core.records import Execution, ExecutionStatus, Problem, Split
from tests.verifiers.rows import execution_of, rollout_of


@pytest.fixture(scope="module")
def domain() -> ProgramDomain:
    return ProgramDomain("program", ProgramDomainConfig(instruction="", demonstration_quality=0.5))


def problems(domain: ProgramDomain, split: Split) -> list[Problem]:
    return [domain.problem(split, index) for index in range(domain.num_problems(split))]


def outputs_of(expression: str) -> tuple[int, ...]:
    """Run one of our own spellings (never anything that a policy wrote)."""
    return tuple(eval(expression, {"x": x}) for x in BEHAVIOUR_INPUTS)


def run(domain: ProgramDomain, problem: Problem, text: str) -> Execution:
    """What an honest sandbox would report for a trusted text."""
    request = domain.program(problem, rollout_of(text))
    assert request is not None
    scope: dict[str, object] = {}
    if request.entry:
        exec(request.source, scope)
        call = scope[request.entry]
    else:
        call = eval(f"lambda x: ({request.source})")
    return execution_of([call(*eval(arguments)) for arguments in request.inputs])  # type: ignore[operator]


def reward(domain: ProgramDomain, problem: Problem, text: str) -> float:
    return domain.verify(problem, rollout_of(text), run(domain, problem, text)).reward


def test_there_are_several_hundred_functions_and_about_a_fifth_is_held_out(domain: ProgramDomain) -> None:
    train, held_out = domain.num_problems(Split.TRAIN), domain.num_problems(Split.HELD_OUT)
    assert train + held_out == len(all_functions()) >= 500
    assert 0.15 < held_out / (train + held_out) < 0.25


def test_the_splits_share_no_behaviour_however_it_is_spelt(domain: ProgramDomain) -> None:
    split_of = {problem.id: split for split in Split for problem in problems(domain, split)}
    assert len(split_of) == len(all_functions())
    by_outputs: dict[tuple[int, ...], set[Split]] = {}
    for family in FAMILIES:
        for a in family.values_a:
            for b in family.values_b:
                outputs = outputs_of(family.spelling.format(a=a, b=b))
                by_outputs.setdefault(outputs, set()).add(split_of[f"program/{behaviour_id(outputs)}"])
    assert all(len(splits) == 1 for splits in by_outputs.values())
    assert len(by_outputs) == len(all_functions())


def test_spellings_and_the_functions_behind_them_agree() -> None:
    for function in all_functions().values():
        assert outputs_of(function.expression) == function.outputs


def test_two_spellings_of_one_behaviour_are_one_function() -> None:
    assert behaviour_id(outputs_of("(x+1)*3")) == behaviour_id(outputs_of("3*x+3"))
    assert behaviour_id(outputs_of("3*x+3")) in all_functions()


def test_the_examples_shown_determine_the_function_within_the_grammar() -> None:
    shown = {tuple(function(x) for x in VISIBLE_INPUTS) for function in all_functions().values()}
    assert len(shown) == len(all_functions())


def test_hidden_inputs_are_not_shown_and_are_told_apart_from_look_alikes(domain: ProgramDomain) -> None:
    for function in all_functions().values():
        inputs = hidden_inputs(function.id)
        assert len(set(inputs)) == len(inputs) >= 5
        assert not set(inputs) & set(VISIBLE_INPUTS)
        for neighbour in function.neighbours:
            other = all_functions()[neighbour]
            assert [other(x) for x in inputs] != [function(x) for x in inputs]


def test_the_prompt_shows_the_examples_and_hides_the_rest(domain: ProgramDomain) -> None:
    for problem in problems(domain, Split.HELD_OUT):
        shown = {int(x): int(y) for x, y in re.findall(r"(-?\d+):(-?\d+)", problem.prompt[0].content)}
        assert tuple(shown) == VISIBLE_INPUTS
        assert "outputs" not in problem.payload


def test_every_function_passes_as_its_own_expression_and_its_neighbours_do_not(domain: ProgramDomain) -> None:
    for problem in problems(domain, Split.HELD_OUT):
        function = all_functions()[problem.id.split("/")[1]]
        assert reward(domain, problem, function.expression) == 1.0
        for neighbour in function.neighbours:
            assert reward(domain, problem, all_functions()[neighbour].expression) == 0.0


ANSWERS = [
    "{e}",
    "  {e} \n",
    "`{e}`",
    "**{e}**",
    "```\n{e}\n```",
    "```python\n{e}\n```",
    "Here it is:\n```python\ndef f(x):\n    return {e}\n```\nIt fits all examples.",
    "lambda x: {e}",
    "f = lambda x: {e}",
    "def f(x):\n    return {e}",
    "def solve(n: int) -> int:\n    x = n\n    return {e}",
    "import math\n\ndef helper(x):\n    return {e}\n\ndef f(x):\n    return helper(x)",
    "<answer>{e}</answer>",
]


@pytest.mark.parametrize("shape", ANSWERS)
def test_honest_answers_pass_in_any_usual_wrapping(domain: ProgramDomain, shape: str) -> None:
    problem = domain.problem(Split.TRAIN, 0)
    function = all_functions()[problem.id.split("/")[1]]
    assert reward(domain, problem, shape.format(e=function.expression)) == 1.0
    assert reward(domain, problem, shape.format(e=f"{function.expression}+1")) == 0.0


def test_a_power_is_not_taken_for_bold_marks() -> None:
    assert source_and_entry("x**2") == ("x**2", "")


def test_special_casing_the_examples_fails(domain: ProgramDomain) -> None:
    for problem in problems(domain, Split.HELD_OUT):
        shown = dict(re.findall(r"(-?\d+):(-?\d+)", problem.prompt[0].content))
        table = "{" + ", ".join(f"{x}: {y}" for x, y in shown.items()) + "}"
        assert reward(domain, problem, f"{table}.get(x, 0)") == 0.0


@pytest.mark.parametrize("text", ["", "  \n", "``", "x+" + "1+" * 4000 + "1"])
def test_empty_and_endless_answers_are_invalid(domain: ProgramDomain, text: str) -> None:
    problem = domain.problem(Split.TRAIN, 0)
    rollout = rollout_of(text)
    request = domain.program(problem, rollout)
    # What is not refused here is left to the sandbox, which finds that it does not load.
    status = ExecutionStatus.NOTHING if request is None else ExecutionStatus.RUNTIME_ERROR
    verdict = domain.verify(problem, rollout, Execution("r", status))
    assert verdict.reward == 0.0
    assert verdict.flags == ("invalid",)


def test_hostile_text_is_searched_in_bounded_time_and_never_run(domain: ProgramDomain) -> None:
    problem = domain.problem(Split.TRAIN, 0)
    for text in ("(" * 4000, "def " * 1000, "lambda " * 500, "`" * 4000, "```\n" * 1000, "<answer>" * 500):
        domain.program(problem, rollout_of(text))
    assert domain.program(problem, rollout_of("__import__('os').abort()")) is not None


def test_demonstrations_have_the_quality_asked_for_and_come_from_the_training_split() -> None:
    train = ProgramDomain("program", ProgramDomainConfig(instruction="", demonstration_quality=0.3))
    answers = {p.prompt[0].content: p for p in problems(train, Split.TRAIN)}
    demonstrations = train.demonstrations(2000, seed=5)
    right = 0
    for demonstration in demonstrations:
        problem = answers[demonstration.prompt[0].content]  # KeyError: not a training problem
        right += reward(train, problem, demonstration.response) == 1.0
    assert 0.25 < right / len(demonstrations) < 0.35
    assert train.demonstrations(50, seed=5) == demonstrations[:50]
    assert train.demonstrations(50, seed=6) != demonstrations[:50]


def test_the_instruction_precedes_the_examples() -> None:
    told = make_domain("p", ProgramDomainConfig(instruction="Write f.\n"))
    assert told.problem(Split.TRAIN, 0).prompt[0].content.startswith("Write f.\n0:")
    assert told.problem(Split.TRAIN, 0).id.startswith("p/")
