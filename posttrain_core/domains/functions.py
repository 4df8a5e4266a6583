"""The grammar of the program domain: small integer functions, told apart by what they do, not by how they are written.

Two spellings with the same outputs on `BEHAVIOUR_INPUTS` are one `Function`. Its id is a hash of those outputs, and the
id alone decides the split, so no function can be on both sides however it is spelt.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from posttrain_core.records import Split

VISIBLE_INPUTS = (0, 1, 4, 10)
BEHAVIOUR_INPUTS = tuple(range(-20, 61))
HELD_OUT_ONE_IN = 5


@dataclass(frozen=True)
class Family:
    """Functions of one shape with constants a and b."""

    spelling: str
    evaluate: Callable[[int, int, int], int]
    values_a: Sequence[int]
    values_b: Sequence[int] = (0,)


# Earlier families win where two spellings do the same. f(10) shows the constants of most families as decimal digits,
# which is what lets a very small model find the rule.
FAMILIES = (
    Family("x+{a}", lambda x, a, b: x + a, range(1, 10)),
    Family("x-{a}", lambda x, a, b: x - a, range(1, 10)),
    Family("{a}-x", lambda x, a, b: a - x, range(1, 10)),
    Family("{a}*x", lambda x, a, b: a * x, range(2, 10)),
    Family("x//{a}", lambda x, a, b: x // a, range(2, 6)),
    Family("x%{a}", lambda x, a, b: x % a, range(2, 8)),
    Family("x*x+{a}", lambda x, a, b: x * x + a, range(1, 10)),
    Family("x*x-{a}", lambda x, a, b: x * x - a, range(1, 10)),
    Family("{a}*x+{b}", lambda x, a, b: a * x + b, range(2, 10), range(1, 10)),
    Family("{a}*x-{b}", lambda x, a, b: a * x - b, range(2, 10), range(1, 10)),
    Family("{b}-{a}*x", lambda x, a, b: b - a * x, range(2, 10), range(1, 10)),
    Family("{a}*x*x+{b}", lambda x, a, b: a * x * x + b, range(2, 10), range(1, 10)),
    Family("{a}*x*x-{b}", lambda x, a, b: a * x * x - b, range(2, 10), range(1, 10)),
    Family("x*x+{a}*x+{b}", lambda x, a, b: x * x + a * x + b, range(1, 10), range(1, 10)),
    Family("abs({a}*x-{b})", lambda x, a, b: abs(a * x - b), range(2, 10), range(1, 10)),
    Family("max({a}*x,{b})", lambda x, a, b: max(a * x, b), range(2, 10), range(1, 10)),
)


@dataclass(frozen=True)
class Function:
    """One behaviour of the grammar. `outputs` are its values on BEHAVIOUR_INPUTS; `expression` its first spelling."""

    id: str
    expression: str
    outputs: tuple[int, ...]
    neighbours: tuple[str, ...]  # ids of functions that look alike and do something else

    def __call__(self, x: int) -> int:
        return self.outputs[x - BEHAVIOUR_INPUTS[0]]

    @property
    def split(self) -> Split:
        return Split.HELD_OUT if int(self.id, 16) % HELD_OUT_ONE_IN == 0 else Split.TRAIN


@dataclass(frozen=True)
class _Spelling:
    family: int
    a: int
    b: int

    def outputs(self) -> tuple[int, ...]:
        return tuple(FAMILIES[self.family].evaluate(x, self.a, self.b) for x in BEHAVIOUR_INPUTS)

    def text(self) -> str:
        return FAMILIES[self.family].spelling.format(a=self.a, b=self.b)

    def look_alikes(self) -> list["_Spelling"]:
        """A constant off by one, or another family with the same constants."""
        steps = [(-1, 0), (1, 0), (0, -1), (0, 1)]
        return [_Spelling(self.family, self.a + da, self.b + db) for da, db in steps] + [
            _Spelling(other, self.a, self.b) for other in range(len(FAMILIES)) if other != self.family
        ]


def behaviour_id(outputs: Sequence[int]) -> str:
    """16 hexadecimal digits that name a behaviour, whatever its spelling."""
    return hashlib.sha256(json.dumps(list(outputs)).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def all_functions() -> dict[str, Function]:
    """Every function of the grammar by id, in the order of the ids (which is a shuffle that no seed can change)."""
    spellings = [
        _Spelling(index, a, b)
        for index, family in enumerate(FAMILIES)
        for a, b in itertools.product(family.values_a, family.values_b)
    ]
    ids = {spelling: behaviour_id(spelling.outputs()) for spelling in spellings}
    firsts: dict[str, _Spelling] = {}
    for spelling in spellings:
        firsts.setdefault(ids[spelling], spelling)
    return {key: _function(key, firsts[key], ids) for key in sorted(firsts)}


def _function(key: str, spelling: _Spelling, ids: dict[_Spelling, str]) -> Function:
    found = [ids[other] for other in spelling.look_alikes() if other in ids and ids[other] != key]
    return Function(key, spelling.text(), spelling.outputs(), tuple(dict.fromkeys(found)))
