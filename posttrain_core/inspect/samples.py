"""Attempts at held-out problems, for a look at what a policy version does."""

from dataclasses import dataclass

import pyarrow.dataset as ds

from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.tables import read
from posttrain_core.records import Purpose


@dataclass(frozen=True)
class Attempt:
    rollout_id: str
    problem_id: str
    prompt: str
    text: str
    reward: float


def held_out_attempts(run: Run, version: int) -> list[Attempt]:
    """The first attempt at each held-out problem under a policy version, in the order of the plan."""
    chosen = (ds.field("purpose") == str(Purpose.EVAL)) & (ds.field("iteration") == version)
    rollouts = read(run, "rollouts", ["rollout_id", "problem_id", "sample_index", "messages", "text"], chosen)
    verdicts = read(run, "verdicts", ["rollout_id", "reward"], chosen)
    rewards = dict(zip(verdicts["rollout_id"].to_pylist(), verdicts["reward"].to_pylist(), strict=True))
    return [
        Attempt(row["rollout_id"], row["problem_id"], _prompt(row["messages"]), row["text"], rewards[row["rollout_id"]])
        for row in sorted(rollouts.to_pylist(), key=lambda row: str(row["rollout_id"]))
        if row["sample_index"] == 0
    ]


def _prompt(messages: list[dict[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages if message["role"] == "user")
