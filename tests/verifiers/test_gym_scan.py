"""Which generators of the installed reasoning-gym are refused, and that no other scores by running an answer."""

import ast
import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from posttrain_core.verifiers.gym_scan import code_evaluation

REFUSED = {
    "binary_matrix": "uses eval",
    "bitwise_arithmetic": "uses eval",
    "codeio": "uses zss",
    "composite": "hands the answer to another generator",
    "countdown": "uses sympy.parsing.sympy_parser",
    "intermediate_integration": "uses sympy",
    "n_queens": "uses eval",
    "number_sorting": "uses eval",
    "polynomial_multiplication": "uses sympy",
    "puzzle24": "uses sympy.parsing.sympy_parser",
    "rubiks_cube": "uses magiccube.cube",
    "simple_integration": "uses sympy",
    "spiral_matrix": "uses eval",
    "string_insertion": "uses eval",
}
EVALUATORS = {"eval", "exec", "compile", "__import__", "parse_expr", "sympify", "lambdify", "getattr", "pickle", "os"}
MAKES_PROBLEMS_ONLY = {  # functions of generators that are not refused, read by hand: only __getitem__ leads to them
    "basic_arithmetic": {"eval_floordiv"},
    "gsm_symbolic": {"_load_generators"},
    "list_functions": {"_load_generators"},
}
PAYLOADS = ["[__import__('os').getpid()]", "__import__('os').getpid()", "{'a': [1]}", "1 + 1", "x**2", "(0, 1)", "nan"]
SLOW = {"futoshiki", "knight_swap"}  # to make; the scorers of both are read by the other tests

DYNAMIC = """
import json, sys
from reasoning_gym.factory import create_dataset
ran, now = {}, None
def hook(event, arguments):
    names = (getattr(arguments[0], "co_filename", ""), *arguments[1:]) if event in ("exec", "compile") else ()
    if now and "<string>" in names:
        ran.setdefault(now, event)
sys.addaudithook(hook)
for name in json.loads(sys.argv[1]):
    dataset = create_dataset(name, seed=0, size=1)
    item = dataset[0]
    now = name
    for answer in [str(item["answer"]), *json.loads(sys.argv[2])]:
        try: dataset.score_answer(answer, item)
        except Exception: pass
    now = None
print()
print(json.dumps(ran))
"""


def test_the_refused_generators_are_these() -> None:
    found = {name: code_evaluation(kind) for name, (kind, _) in DATASETS.items()}
    refused = {name: reason for name, reason in found.items() if reason}
    assert refused.keys() == REFUSED.keys()
    assert all(reason.endswith(REFUSED[name]) for name, reason in refused.items())


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - REFUSED.keys()))
def test_the_module_of_any_other_names_nothing_that_evaluates(name: str) -> None:
    """The whole module, but for what is listed above: read from the source, without the scan."""
    tree = ast.parse(inspect.getsource(sys.modules[DATASETS[name][0].__module__]))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & EVALUATORS - own
        assert not used or function.name in MAKES_PROBLEMS_ONLY.get(name, ()), f"{function.name} uses {used}"


def test_no_scorer_that_is_not_refused_runs_an_answer() -> None:
    names = sorted(DATASETS.keys() - REFUSED.keys() - SLOW)
    command = [sys.executable, "-c", DYNAMIC]
    done = subprocess.run(
        [*command, json.dumps(names), json.dumps(PAYLOADS)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {}
    seen = subprocess.run([*command, '["n_queens"]', json.dumps(PAYLOADS)], capture_output=True, text=True, check=True)
    assert json.loads(seen.stdout.splitlines()[-1]) == {"n_queens": "compile"}  # the hook sees what it is to see


class Plain:
    def score_answer(self, answer: str, entry: Any) -> float:
        return float(json.loads(answer) == entry["answer"])


class Helper:
    def read(self, answer: str) -> Any:
        return eval(answer)


def decorated(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def around(*arguments: Any) -> float:
        return function(*arguments)

    return around


READERS = {"python": eval}


class ByInheritedMethod(Plain):
    def _read(self, answer: str) -> Any:
        return eval(answer)

    def score_answer(self, answer: str, entry: Any) -> float:
        return float(self._read(answer))


class ByObject(Plain):
    def __init__(self) -> None:
        self.helper = Helper()

    def score_answer(self, answer: str, entry: Any) -> float:
        return float(self.helper.read(answer))


class ByTable(Plain):
    def score_answer(self, answer: str, entry: Any) -> float:
        return float(READERS["python"](answer))


class ByNestedFunction(Plain):
    def score_answer(self, answer: str, entry: Any) -> float:
        return sum(float(eval(part)) for part in answer.split())


class ByDecorated(Plain):
    @decorated
    def score_answer(self, answer: str, entry: Any) -> float:
        return float(eval(answer))


class ByImport(Plain):
    def score_answer(self, answer: str, entry: Any) -> float:
        import pickle

        return float(pickle.loads(answer.encode()))


class ByName(Plain):
    def score_answer(self, answer: str, entry: Any) -> float:
        return float(getattr(self, answer)())


@pytest.mark.parametrize(
    "kind",
    [ByInheritedMethod, ByObject, ByTable, ByNestedFunction, ByDecorated, ByImport, ByName],
    ids=lambda k: k.__name__,
)
def test_the_scan_sees_through(kind: type) -> None:
    assert code_evaluation(kind)


def test_parsing_json_is_not_evaluating() -> None:
    assert code_evaluation(Plain) is None
