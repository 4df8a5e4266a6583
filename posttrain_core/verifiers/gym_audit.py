"""Whether a scorer can be trained on: wrong answers that need no thought must not be paid, the references must be."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain_core.errors import ConfigError
from posttrain_core.verifiers.reasoning_gym import FULL_SCORE, Scorer

NUM_PROBLEMS = 20
NUM_TOLERATED = 1  # one problem may be odd; two are a habit that a policy finds
LARGE_SHARE = 0.5  # what a lenient `min_score` pays for an answer that contains the right one is not the scorer's fault
THOUGHTLESS = ("", " ", "garbage", "nan", "inf", "1e999", "0", "-1", "999999999999", "I do not know")


def audit(scorer: Scorer, generator: str, references: Sequence[Any], min_score: float) -> None:
    """Score canned answers, and the reference, to the first problems.

    Raises ConfigError where one canned answer is paid, or the reference is not, on more than one problem. Items without
    a text as reference tell nothing about references. An answer that is not scored in time tells nothing.
    """
    of = f"its first {min(NUM_PROBLEMS, len(references))}"
    paid: Counter[str] = Counter()
    unpaid = 0
    for index, reference in enumerate(references[:NUM_PROBLEMS]):
        for label, score in _scored(scorer, index, _answers(reference)):
            if label is None:
                unpaid += not score >= min(FULL_SCORE, max(min_score, LARGE_SHARE))  # so that nan counts
            else:
                paid[label] += score >= min_score and score > LARGE_SHARE
    if unpaid > NUM_TOLERATED:
        raise ConfigError(
            f"generator: {generator!r} is refused: its scorer does not pay {unpaid} of {of} reference answers; "
            "choose another generator"
        )
    if habits := [f"{label!r} ({times})" for label, times in paid.items() if times > NUM_TOLERATED]:
        raise ConfigError(
            f"generator: {generator!r} is refused: of {of} problems, its scorer pays these wrong answers on "
            f"so many: {', '.join(habits)}; choose another generator"
        )


def _answers(reference: Any) -> Mapping[str | None, str]:
    """By label (None: the reference itself), without those that are right."""
    if not isinstance(reference, str):
        return {text: text for text in THOUGHTLESS}
    canned: dict[str | None, str] = {text: text for text in THOUGHTLESS if not _same(text, reference)}
    return {None: reference, **canned}


def _scored(scorer: Scorer, index: int, answers: Mapping[str | None, str]) -> Iterator[tuple[str | None, float]]:
    """All at once; one by one where that did not end well. A scorer that raises pays nothing."""
    reply = scorer.scores(index, list(answers.values()))
    replies = reply.get("scores") or [scorer.score(index, answer) for answer in answers.values()]
    for label, single in zip(answers, replies, strict=True):
        if "score" in single or "raised" in single:
            yield label, float(single.get("score", 0.0))


def _same(answer: str, reference: str) -> bool:
    """Alike but for case, space and the way a number is written."""
    one, other = ("".join(text.casefold().split()) for text in (answer, reference))
    try:
        return one == other or math.isclose(float(one), float(other))
    except ValueError:
        return False
