"""`make_learner`: the learner that a run's configuration names. Imports the chosen one only."""

from pathlib import Path

from posttrain_core.config import RunConfig
from posttrain_core.learner.protocol import Learner


def make_learner(config: RunConfig, scratch: Path) -> Learner:
    """`scratch` is a folder of the learner's own, kept as long as it lives."""
    if config.learner.type == "numpy":
        from posttrain_core.learner.numpy_learner import NumpyLearner

        return NumpyLearner(config.learner)
    from posttrain_core.learner.deepspeed_learner import DeepSpeedLearner

    return DeepSpeedLearner(config.learner, config.algorithm, config.model.dtype, config.plan.max_new_tokens, scratch)
