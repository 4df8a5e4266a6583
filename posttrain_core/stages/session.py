"""`LearnerSession`: a warm learner and the policy version it holds.

Whatever happened before, `bring_to` puts the learner at a version from the store alone: the newest checkpoint at or
below it, then the stored samples of the updates in between.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain_core import layout
from posttrain_core.errors import LearnerFault
from posttrain_core.layout import Scope
from posttrain_core.learner.protocol import Learner
from posttrain_core.manifest import Manifest, read_table
from posttrain_core.records import Sample
from posttrain_core.stages.context import Run


class LearnerSession:
    """Not for several threads: an iteration has one update at a time."""

    def __init__(self, run: Run, learner: Learner) -> None:
        self.run = run
        self.learner = learner
        self._version: int | None = None

    def bring_to(self, version: int) -> None:
        """Make the learner hold `version` with the optimizer state that belongs to it."""
        if self._version == version:
            return
        self._version = None
        start = self._load(version)
        for iteration in range(start, version):
            self._replay(iteration)
        self._version = version

    def with_reference(self, iteration: int, samples: list[Sample]) -> list[Sample]:
        """The samples with their log-probabilities under the reference policy, where `algorithm.kl` asks for them."""
        if self.run.config.algorithm.kl is None:
            return samples
        self.bring_to(iteration)
        rows = self.learner.reference_logprobs(samples)
        return [replace(sample, reference_logprobs=row) for sample, row in zip(samples, rows, strict=True)]

    def step(self, iteration: int, samples: list[Sample]) -> dict[str, float]:
        """Update from version `iteration` to the next one; a fault leaves the session to be brought up again."""
        self.bring_to(iteration)
        self._version = None
        metrics = dict(self.learner.update(samples, self.run.seed("update", iteration)))
        self._version = iteration + 1
        return metrics

    def probe(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> dict[str, Any]:
        """Tokens with their log-probabilities under the held policy at temperature 1: a proof for samplers."""
        return {
            "prompt_ids": list(prompt_ids),
            "response_ids": list(response_ids),
            "logprobs": self.learner.score(prompt_ids, response_ids, 1.0),
        }

    def forget(self) -> None:
        """The learner was used for something else, or failed."""
        self._version = None

    def _load(self, version: int) -> int:
        base = self.run.policy_folder(self.run.policy(0))
        for iteration in range(version - 1, -1, -1):
            update = self.run.manifest(Scope(iteration), "update")
            prefix = update.notes.get("checkpoint")
            if prefix and self.run.store.stat(layout.retired(self.run.name, "checkpoints", iteration)) is None:
                folder = self.run.folders.get("checkpoint", update.named("/checkpoints/"), prefix)
                if note := self.learner.load_checkpoint(folder, base):
                    self.run.progress.note(note)
                return iteration + 1
        self.learner.load_weights(base)
        return 0

    def _replay(self, iteration: int) -> None:
        update = self.run.manifest(Scope(iteration), "update")
        samples = read_samples(self.run, update)
        with self.run.timed(Scope(iteration), "replay", samples=len(samples)):
            metrics = dict(self.learner.update(samples, self.run.seed("update", iteration)))
        if metrics != dict(update.metrics):
            names = [name for name, value in metrics.items() if update.metrics.get(name) != value]
            self.run.progress.note(
                f"replaying update {iteration} gave other numbers than it did first ({', '.join(names[:4])}): "
                "the machine, its threads, the learner's layout or library versions differ; the run goes on from here"
            )


def read_samples(run: Run, update: Manifest) -> list[Sample]:
    refs = update.named("/samples/")
    if not refs:
        raise LearnerFault(f"update {update.iteration} of run {run.name!r} names no samples")
    return [sample for ref in refs for sample in read_table(run.store, ref, Sample)]
