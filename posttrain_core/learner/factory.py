"""`make_learner`: the learner that a run's configuration names. Imports the chosen one only."""

from collections.abc import Callable
from pathlib import Path

from posttrain_core.config import RunConfig
from posttrain_core.learner.protocol import Learner


def make_learner(config: RunConfig, scratch: Path, on_progress: Callable[[int, int], None] | None = None) -> Learner:
    """`scratch` is a folder that is kept as long as the learner lives; it works below scratch/learner. `on_progress`
    is told optimizer steps done and steps in all of an update or a warm start."""
    if config.learner.type == "numpy":
        from posttrain_core.learner.numpy_learner import NumpyLearner

        return NumpyLearner(config.learner, config.algorithm.mismatch)
    from posttrain_core.learner.deepspeed_learner import DeepSpeedLearner

    return DeepSpeedLearner(
        config.learner,
        config.algorithm,
        config.model.dtype,
        config.plan.max_new_tokens,
        scratch / "learner",
        on_progress,
    )
