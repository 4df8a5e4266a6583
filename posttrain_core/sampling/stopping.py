"""When a completion ends before its limit: a pure function of its tokens, the same for every sampler."""

from collections.abc import Callable, Sequence
from typing import Protocol

from posttrain_core.config import RepetitionConfig
from posttrain_core.records import FinishReason
from posttrain_core.sampling.protocol import SampleRequest

Decode = Callable[[Sequence[int]], str]

PARTIAL = "\ufffd"  # how tokenizers show a character whose bytes are not all there
MOST_PARTIAL_TOKENS = 8  # a character has 4 bytes at most: what is longer is not going to become one


class Rule(Protocol):
    reason: FinishReason

    def add(self, token: int) -> bool:
        """Take the next token; true when the completion ends with it."""


class StopStrings:
    """Holds from the first token after which the text holds one of `stop`.

    The text grows by the decoded difference that a token makes behind its predecessors, so that spaces between words
    and characters of several tokens come out right; each token costs one or two decodings of a few tokens.
    """

    reason = FinishReason.STOP_RULE

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = stop
        self._decode = decode
        self._keep = max(map(len, stop)) - 1  # a stop string can begin so many characters back
        self._before = ""  # the last characters of the text that no later token changes
        self._window: list[int] = []  # the newest tokens: the first `_settled` of them have the text `_shown`
        self._settled = 0
        self._shown = ""

    def add(self, token: int) -> bool:
        self._window.append(token)
        text = self._decode(self._window)
        recent = self._before + text[len(self._shown) :]
        if any(stop in recent for stop in self._stop):
            return True
        whole = len(text) > len(self._shown) and not text.endswith(PARTIAL)
        if whole or len(self._window) - self._settled >= MOST_PARTIAL_TOKENS:
            self._before = recent[-self._keep :] if self._keep else ""
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._shown = self._decode(self._window)
        return False


class Repetition:
    """Holds from the first token after which the last `num_tokens` have a period of at most `max_period`.

    They have the period p when each of the last num_tokens - p tokens equals the one p before it. Such runs are counted
    for the periods at which the new token occurred before, few in most text.
    """

    reason = FinishReason.REPETITION

    def __init__(self, config: RepetitionConfig) -> None:
        self._num_tokens = config.num_tokens
        self._max_period = config.max_period
        self._count = 0
        self._latest: dict[int, int] = {}  # token: its last position
        self._earlier = [-1] * config.max_period  # of the last tokens, by position: where it occurred before that
        self._run = [0] * (config.max_period + 1)  # by period: tokens in a row that equal the one a period before
        self._end = [-1] * (config.max_period + 1)  # by period: where that run ended

    def add(self, token: int) -> bool:
        position = self._count
        self._count += 1
        before = self._latest.get(token, -1)
        self._latest[token] = position
        self._earlier[position % self._max_period] = before
        while before >= 0 and (period := position - before) <= self._max_period:
            run = self._run[period] + 1 if self._end[period] == position - 1 else 1
            if run >= self._num_tokens - period:
                return True
            self._run[period], self._end[period] = run, position
            before = self._earlier[before % self._max_period] if period < self._max_period else -1
        return False


def rules(request: SampleRequest, decode: Decode) -> list[Rule]:
    """Those that can end the request before its limit. The first that holds gives the reason."""
    found: list[Rule] = []
    if request.stop:
        found.append(StopStrings(request.stop, decode))
    if request.repetition is not None and request.max_new_tokens >= request.repetition.num_tokens:
        found.append(Repetition(request.repetition))
    return found


class Ending:
    """Says of each token of a completion whether it is the last, and why."""

    def __init__(self, request: SampleRequest, end_ids: frozenset[int], decode: Decode) -> None:
        self._end_ids = end_ids
        self._left = request.max_new_tokens
        self._rules = rules(request, decode)

    def add(self, token: int) -> FinishReason | None:
        """The reason when the completion ends with this token: the policy's own end, a rule or the limit."""
        self._left -= 1
        if token in self._end_ids:
            return FinishReason.STOP
        for rule in self._rules:
            if rule.add(token):
                return rule.reason
        return FinishReason.LENGTH if self._left <= 0 else None
