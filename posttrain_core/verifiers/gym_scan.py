"""Whether a generator's scorer can evaluate code: read from the compiled functions that `score_answer` can reach.

Answers are text that a model wrote; a scorer that hands them to `eval`, or to a parser that calls `eval` (sympy's),
runs them. The scan errs on the safe side: it follows every name a function loads, called or not, and refuses every
module outside the standard library and numpy, whether or not it sees the answer.
"""

import builtins
import dis
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_EVALUATORS = {"eval", "exec", "compile", "__import__", "execfile", "getattr", "globals", "vars", "setattr", "open"}
_EVALUATING_ATTRIBUTES = {"eval", "exec", "parse_expr", "sympify", "lambdify", "system", "popen"}
_REFUSED_MODULES = {"builtins", "code", "codeop", "ctypes", "importlib", "marshal", "multiprocessing", "os", "pickle"}
_REFUSED_MODULES |= {"posix", "pty", "runpy", "shelve", "shutil", "socket", "subprocess"}
_TRUSTED_ROOTS = (set(sys.stdlib_module_names) | {"numpy"}) - _REFUSED_MODULES
_OBJECTS = {getattr(builtins, name): name for name in _EVALUATORS if hasattr(builtins, name)}


def code_evaluation(dataset: type) -> str | None:
    """What on the scoring path of `dataset` evaluates, or may evaluate, code; None if there is nothing of the kind."""
    scan = _Scan(dataset)
    while scan.waiting and not scan.found:
        scan.read(scan.waiting.pop())
    return scan.found


class _Scan:
    def __init__(self, dataset: type) -> None:
        self.found: str | None = None
        self.waiting: list[FunctionType] = []
        self._dataset = dataset
        self._root = dataset.__module__.partition(".")[0]
        self._seen: set[int] = set()
        self._follow_attribute(dataset, "score_answer")

    def read(self, function: FunctionType) -> None:
        where = f"{function.__module__}.{function.__qualname__}"
        names = set(_names(function.__code__))
        attributes = {name for kind, name in names if kind == "attribute"}
        if "score_answer" in attributes and ("global", "super") not in names:
            self.found = f"{where} hands the answer to another generator"
        if evaluating := sorted(attributes & _EVALUATING_ATTRIBUTES):
            self.found = f"{where} uses {evaluating[0]}"
        owners: list[type | ModuleType] = [self._dataset, *self._own_classes(function)]
        for kind, name in names:
            if kind == "import":
                self._follow_module(name, where)
            elif kind == "global":
                value = function.__globals__.get(name, getattr(builtins, name, None))
                self._follow(value, where)
                owners += [value] if isinstance(value, ModuleType) else []
        for owner in owners:
            for name in attributes:
                self._follow_attribute(owner, name)
        for cell in function.__closure__ or ():
            self._follow(cell.cell_contents, where)

    def _own_classes(self, function: FunctionType) -> list[type]:
        """Those the function's module knows: an attribute of an unknown object may be a method of any of them."""
        return [value for value in function.__globals__.values() if isinstance(value, type) and self._own(value)]

    def _own(self, value: Any) -> bool:
        return str(getattr(value, "__module__", "")).partition(".")[0] == self._root

    def _follow_attribute(self, owner: Any, name: str) -> None:
        if isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] != self._root:
            return
        bases = [vars(base) for base in inspect.getmro(owner)] if isinstance(owner, type) else [vars(owner)]
        for names in bases:
            if name in names:
                self._follow(names[name], f"{owner.__name__}.{name}")

    def _follow(self, value: Any, where: str) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if value.__hash__ and value in _OBJECTS:
            self.found = f"{where} uses {_OBJECTS[value]}"
        elif isinstance(value, (dict, list, tuple, set)):
            for part in value.values() if isinstance(value, dict) else value:
                self._follow(part, where)
        elif isinstance(value, ModuleType):
            self._follow_module(value.__name__, where)
        else:
            self._follow_object(value, where)

    def _follow_object(self, value: Any, where: str) -> None:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        for inner in (getattr(value, "__wrapped__", None), getattr(value, "func", None)):
            if inner is not None:
                self._follow(inner, where)
        if callable(value) and not self._own(value):
            self._follow_module(str(getattr(value, "__module__", None) or type(value).__module__), where)
        elif isinstance(value, FunctionType):
            self.waiting.append(value)
        elif isinstance(value, type) and value not in inspect.getmro(self._dataset):
            for part in vars(value).values():
                self._follow(part, where)
        elif not isinstance(value, type) and self._own(type(value)):
            self._follow(type(value), where)

    def _follow_module(self, name: str, where: str) -> None:
        root = name.partition(".")[0]
        if root not in _TRUSTED_ROOTS | {"builtins", self._root}:
            self.found = f"{where} uses {name}"


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """("global" | "attribute" | "import", name) of everything the code and the functions inside it load."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield "global", step.argval
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            yield "attribute", step.argval
        elif step.opname == "IMPORT_NAME":
            yield "import", step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
