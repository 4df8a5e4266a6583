"""The domain protocol."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from posttrain_core.learner.protocol import Demonstration
from posttrain_core.records import Execution, Problem, Rollout, Split, Verdict
from posttrain_core.sandbox.protocol import Limits, ProgramRequest


class Domain(Protocol):
    """One kind of work. Every method is a pure function of the domain's configuration and its arguments."""

    name: str
    limits: Limits  # of one execution

    def num_problems(self, split: Split) -> int: ...

    def problem(self, split: Split, index: int) -> Problem:
        """The index-th problem of a split, 0 <= index < num_problems. The splits are disjoint by construction."""

    def program(self, problem: Problem, rollout: Rollout) -> ProgramRequest | None:
        """What a sandbox has to run for this rollout; None when there is nothing to run."""

    def verify(self, problem: Problem, rollout: Rollout, execution: Execution) -> Verdict:
        """Compare what was recorded with what was expected. Never runs candidate bytes."""

    def demonstrations(self, num: int, seed: int) -> Sequence[Demonstration]:
        """Supervised examples from the training split, for a warm start; empty where the domain has none."""

    def verifier_fingerprint(self) -> Mapping[str, Any]:
        """JSON: everything that `verify` depends on besides its arguments (name, version, tolerances)."""
