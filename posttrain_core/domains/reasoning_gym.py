"""Any generator of the reasoning-gym package as a domain: its questions, its scorer; nothing to execute."""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posttrain_core.config import ReasoningGymDomainConfig
from posttrain_core.domains.answers import MAX_CHARACTERS, bare_answer
from posttrain_core.errors import ConfigError
from posttrain_core.learner.protocol import Demonstration
from posttrain_core.records import Execution, Message, Outcome, Problem, Rollout, Split, Verdict
from posttrain_core.sandbox.protocol import Limits, ProgramRequest
from posttrain_core.verifiers import reasoning_gym as gym
from posttrain_core.verifiers.gym_audit import audit

HELD_OUT_ONE_IN = 5


@dataclass(frozen=True)
class Item:
    """One question of the generator; `index` is its first occurrence there."""

    index: int
    question: str
    reference: Any  # text, or None where the generator has no single answer
    first: str  # the first question that asks the same, maybe in other words

    @property
    def key(self) -> str:
        return _key(self.question)

    @property
    def split(self) -> Split:
        return Split.HELD_OUT if int(_key(self.first), 16) % HELD_OUT_ONE_IN == 0 else Split.TRAIN


class ReasoningGymDomain:
    """Questions are told apart by their text: a question occurs once.

    A hash decides the split: of the first question with the same content, so that wordings of one problem stay on one
    side. The content is the item's metadata, where that identifies the problem, which is judged by the answers: two
    items that share a content and not the answer show that it does not, and then each question stands for itself. So
    wordings may straddle the split in generators whose metadata says too little (aiw, self_reference), and where the
    metadata holds the wording as well (names in a story).
    """

    def __init__(self, name: str, config: ReasoningGymDomainConfig) -> None:
        self.name = name
        self.limits = Limits()
        self._config = config
        self._scorer = gym.Scorer(config.generator, config.options, config.num_problems, config.score_timeout_seconds)

    @cached_property
    def _items(self) -> Mapping[Split, Sequence[Item]]:
        made = self._scorer.items()
        audit(self._scorer, self._config.generator, [answer for _, answer, _ in made], self._config.min_score)
        ordered = sorted(_different(made), key=lambda item: item.key)
        splits = {split: [item for item in ordered if item.split is split] for split in Split}
        if not all(splits.values()):
            raise ConfigError(
                f"domain {self.name!r}: {self._config.num_problems} problems of {self._config.generator!r} are "
                f"{len(ordered)} different ones, too few to hold some out; raise num_problems or widen options"
            )
        return splits

    def num_problems(self, split: Split) -> int:
        return len(self._items[split])

    def problem(self, split: Split, index: int) -> Problem:
        item = self._items[split][index]
        return Problem(
            id=f"{self.name}/{item.key}",
            domain=self.name,
            split=split,
            prompt=(Message("user", item.question),),
            hidden={"index": item.index, "answer": item.reference},
        )

    def program(self, problem: Problem, rollout: Rollout) -> ProgramRequest | None:
        return None

    def verify(self, problem: Problem, rollout: Rollout, execution: Execution) -> Verdict:
        if rollout.outcome is not Outcome.SCORED:
            return Verdict(rollout.rollout_id, rollout.outcome, 0.0)
        answer = bare_answer(rollout.text)
        shown = answer if len(answer) <= MAX_CHARACTERS else ""
        hidden = problem.hidden
        return gym.verify(rollout, self._scorer, hidden["index"], shown, hidden["answer"], self._config.min_score)

    def demonstrations(self, num: int, seed: int) -> Sequence[Demonstration]:
        """Right with probability `demonstration_quality`; none of items whose reference is not a text."""
        stream = random.Random(seed)
        items = [item for item in self._items[Split.TRAIN] if isinstance(item.reference, str)]
        return [self._demonstration(stream, items) for _ in range(num if items else 0)]

    def verifier_fingerprint(self) -> Mapping[str, Any]:
        settings = self._config.model_dump(mode="json", include={"generator", "options", "num_problems", "min_score"})
        return {"name": "reasoning_gym", "version": 2, "package": gym.package_version(), **settings}

    def misjudged_references(self, num: int) -> Sequence[Mapping[str, Any]]:
        """Those of the first `num` training problems whose own reference answer does not score 1.0, with the reply.

        Training on such problems would punish right answers. In reasoning-gym 0.1.25 with default options these are
        boxnet, graph_color, propositional_logic, rubiks_cube and rush_hour, and knight_swap now and then.
        """
        found = []
        for item in self._items[Split.TRAIN][:num]:
            reply = self._scorer.score(item.index, str(item.reference))
            if reply.get("score") != gym.FULL_SCORE:
                found.append({"question": item.question, "reference": item.reference, **reply})
        return found

    def close(self) -> None:
        self._scorer.close()

    def _demonstration(self, stream: random.Random, items: Sequence[Item]) -> Demonstration:
        item = stream.choice(items)
        right = stream.random() < self._config.demonstration_quality
        answer = item.reference if right else _wrong(item.reference, items, stream)
        return Demonstration((Message("user", item.question),), answer)


def _key(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def _different(made: Sequence[tuple[str, Any, str | None]]) -> Sequence[Item]:
    """One item for each question, at its first occurrence."""
    references: dict[str, set[str]] = {}
    for _, answer, content in made:
        references.setdefault(content or "", set()).add(str(answer))
    identified = all(len(answers) == 1 for content, answers in references.items() if content)
    firsts: dict[str, str] = {}
    items: dict[str, Item] = {}
    for index, (question, answer, content) in enumerate(made):
        first = firsts.setdefault(content, question) if content and identified else question
        items.setdefault(question, Item(index, question, answer, first))
    return list(items.values())


def _wrong(reference: str, items: Sequence[Item], stream: random.Random) -> str:
    """A whole number off by a little, a text with two neighbours swapped, else another item's answer (maybe right)."""
    if re.fullmatch(r"-?\d{1,15}", reference):
        return str(int(reference) + stream.choice((-3, -2, -1, 1, 2, 3)))
    places = [i for i in range(len(reference) - 1) if reference[i] != reference[i + 1]]
    if not places:
        return str(stream.choice(items).reference)
    i = stream.choice(places)
    return reference[:i] + reference[i + 1] + reference[i] + reference[i + 2 :]
