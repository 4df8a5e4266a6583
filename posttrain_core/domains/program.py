"""Programming by example: some values of an integer function are shown, the policy writes it in Python."""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from posttrain_core.config import ProgramDomainConfig
from posttrain_core.domains.answers import MAX_CHARACTERS, bare_answer
from posttrain_core.domains.functions import BEHAVIOUR_INPUTS, VISIBLE_INPUTS, Function, all_functions
from posttrain_core.learner.protocol import Demonstration
from posttrain_core.records import Execution, Message, Problem, Rollout, Split, Verdict
from posttrain_core.sandbox.protocol import Limits, ProgramRequest
from posttrain_core.verifiers import cases

NUM_HIDDEN_INPUTS = 8
_LAMBDA = re.compile(r"lambda\b")
_DEFINED = re.compile(r"^(?:def\s+(\w+)\s*\(|(\w+)\s*=\s*lambda\b)", re.MULTILINE)


class ProgramDomain:
    """About 700 functions, a fifth of them held out. The visible inputs never occur among the hidden ones.

    Answers may be an expression in x, a lambda, or a module that defines a function (the last one counts); code
    fences, backticks and bold marks around them are taken off.
    """

    def __init__(self, name: str, config: ProgramDomainConfig) -> None:
        self.name = name
        self.limits = Limits()
        self._config = config

    @cached_property
    def _functions(self) -> Mapping[Split, Sequence[Function]]:
        return {split: [f for f in all_functions().values() if f.split is split] for split in Split}

    def num_problems(self, split: Split) -> int:
        return len(self._functions[split])

    def problem(self, split: Split, index: int) -> Problem:
        function = self._functions[split][index]
        inputs = hidden_inputs(function.id)
        return Problem(
            id=f"{self.name}/{function.id}",
            domain=self.name,
            split=split,
            prompt=self._prompt(function),
            payload={"inputs": inputs},
            hidden={"outputs": [function(x) for x in inputs]},
        )

    def program(self, problem: Problem, rollout: Rollout) -> ProgramRequest | None:
        answer = bare_answer(rollout.text)
        if not answer or len(answer) > MAX_CHARACTERS:
            return None
        source, entry = source_and_entry(answer)
        return ProgramRequest(source, entry, tuple(f"[{x}]" for x in problem.payload["inputs"]))

    def verify(self, problem: Problem, rollout: Rollout, execution: Execution) -> Verdict:
        return cases.verify(rollout, execution, problem.hidden["outputs"])

    def demonstrations(self, num: int, seed: int) -> Sequence[Demonstration]:
        """Right with probability `demonstration_quality`, else a function that looks alike."""
        stream = random.Random(seed)
        return [self._demonstration(stream) for _ in range(num)]

    def verifier_fingerprint(self) -> Mapping[str, Any]:
        return {"name": "program", "version": 1, **cases.fingerprint()}

    def _prompt(self, function: Function) -> tuple[Message, ...]:
        examples = " ".join(f"{x}:{function(x)}" for x in VISIBLE_INPUTS)
        return (Message("user", self._config.instruction + examples),)

    def _demonstration(self, stream: random.Random) -> Demonstration:
        function = stream.choice(self._functions[Split.TRAIN])
        written = function
        if stream.random() >= self._config.demonstration_quality:
            written = all_functions()[stream.choice(function.neighbours)]
        return Demonstration(self._prompt(function), written.expression)


def hidden_inputs(function_id: str) -> list[int]:
    """Distinct inputs that a hash of the function picks, half of them negative; none is shown in the prompt."""
    candidates = [x for x in BEHAVIOUR_INPUTS if x not in VISIBLE_INPUTS]
    order = sorted(candidates, key=lambda x: hashlib.sha256(f"{function_id} {x}".encode()).digest())
    negative, positive = [x for x in order if x < 0], [x for x in order if x > 0]
    return [*negative[: NUM_HIDDEN_INPUTS // 2], *positive[: NUM_HIDDEN_INPUTS // 2]]


def source_and_entry(answer: str) -> tuple[str, str]:
    """(source, entry) of a `ProgramRequest`; the text is searched, never parsed."""
    if _LAMBDA.match(answer):
        return f"f = {answer}", "f"
    names = [defined or assigned for defined, assigned in _DEFINED.findall(answer)]
    return answer, names[-1] if names else ""
