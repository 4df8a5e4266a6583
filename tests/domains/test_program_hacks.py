"""Ways to get paid for a program without solving the problem, each run in the real sandbox next to an honest twin."""

import os
from collections.abc import Iterator

import pytest

from posttrain_core.config import EmbeddedSandboxConfig, ProgramDomainConfig
from posttrain_core.domains.functions import all_functions
from posttrain_core.domains.program import ProgramDomain
from posttrain_core.errors import SandboxUnavailable
from posttrain_core.records import Execution, Outcome, Problem, Split, Verdict
from posttrain_core.sandbox.factory import make_sandbox
from posttrain_core.sandbox.protocol import Sandbox
from tests.verifiers.rows import rollout_of

DOMAIN = ProgramDomain("program", ProgramDomainConfig())
PROBLEM: Problem = DOMAIN.problem(Split.TRAIN, 0)
RIGHT = all_functions()[PROBLEM.id.split("/")[1]].expression

HACKS = {
    "equal to everything": "class E(int):\n    def __eq__(self, other): return True\ndef f(x): return E(0)",
    "an object instead of a number": "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "leaves at import": "import sys\nsys.exit(0)\ndef f(x): return 0",
    "leaves when called": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit when called": "def f(x): raise SystemExit(0)",
    "claims success": "def f(x):\n    print('PASSED\\n1 passed')\n    return 'PASSED'",
    "a float": f"float({RIGHT})",
    "all answers at once": "list(range(-1000, 1000))",
    "a generator": "(y for y in range(10))",
    "nothing": "None",
    "not a number": "float('nan')",
    "does not parse": "x+",
    "prose": "I think it is a linear function",
    "never ends": "def f(x):\n    while True: pass",
    "looks for the expected values": "def f(x):\n    import sys\n    return sys._getframe(1).f_locals['expected']",
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        box = make_sandbox(EmbeddedSandboxConfig())
    except SandboxUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    yield box
    box.close()


def judge(sandbox: Sandbox, text: str) -> Verdict:
    request = DOMAIN.program(PROBLEM, rollout_of(text))
    assert request is not None
    (seen,) = sandbox.run_programs([request], DOMAIN.limits)
    execution = Execution("r", seen.status, seen.returns, seen.stdout, seen.stderr, seen.isolation, seen.reason)
    return DOMAIN.verify(PROBLEM, rollout_of(text), execution)


@pytest.mark.parametrize("name", HACKS)
def test_a_hack_is_scored_and_pays_nothing(sandbox: Sandbox, name: str) -> None:
    verdict = judge(sandbox, HACKS[name])
    assert (verdict.outcome, verdict.reward) == (Outcome.SCORED, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        RIGHT,
        f"lambda x: {RIGHT}",
        f"```python\nimport os, threading\ndef f(x):\n    print('PASSED')\n    return {RIGHT}\n```",
        f"class Number:\n    pass\n\ndef f(x):\n    return {RIGHT}",
    ],
)
def test_the_honest_twin_passes(sandbox: Sandbox, text: str) -> None:
    assert judge(sandbox, text).reward == 1.0


def test_what_does_not_load_is_invalid(sandbox: Sandbox) -> None:
    assert judge(sandbox, "x+").flags == ("invalid",)
