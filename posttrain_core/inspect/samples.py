"""Attempts at held-out problems, for a look at what a policy version does."""

from dataclasses import dataclass

from posttrain_core.inspect.catalogue import Run
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
    columns = ("rollout_id", "problem_id", "messages", "text", "reward")
    rows = run.rollouts(*columns, purpose=Purpose.EVAL, iteration=version, sample_index=0).to_pylist()
    return [
        Attempt(row["rollout_id"], row["problem_id"], _prompt(row["messages"]), row["text"], row["reward"])
        for row in sorted(rows, key=lambda row: str(row["rollout_id"]))
    ]


def _prompt(messages: list[dict[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages if message["role"] == "user")
