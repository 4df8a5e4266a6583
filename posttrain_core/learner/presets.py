"""The published recipes as data, and `resolve`: from settings to the parts that a loss is made of."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from posttrain_core.config import AdvantageConfig, AlgorithmConfig, ImportanceConfig, KlConfig, MismatchConfig
from posttrain_core.errors import ConfigError

PolicyLoss = Literal["clip", "sequence_clip", "detached_clip", "plain"]
Normalizer = Literal["sequence_mean", "sequence_sum", "token_mean", "constant"]


@dataclass(frozen=True)
class Preset:
    """One recipe. A bound of None is absent; the clip bounds are distances from a ratio of 1."""

    paper: str
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"]
    scale: Literal["group_std", "batch_std", "none"]
    policy_loss: PolicyLoss
    normalizer: Normalizer
    clip_low: float | None = None
    clip_high: float | None = None


PRESETS = {
    "grpo": Preset("arXiv 2402.03300", "group_mean", "group_std", "clip", "sequence_mean", 0.2, 0.2),
    "dr_grpo": Preset("arXiv 2503.20783", "group_mean", "none", "clip", "constant", 0.2, 0.2),
    "dapo": Preset("arXiv 2503.14476", "group_mean", "group_std", "clip", "token_mean", 0.2, 0.28),
    "rloo": Preset("arXiv 2402.14740", "leave_one_out", "none", "plain", "sequence_sum"),
    "reinforce": Preset("Williams 1992", "batch_mean", "none", "plain", "sequence_sum"),
    "gspo": Preset("arXiv 2507.18071", "group_mean", "group_std", "sequence_clip", "sequence_mean", 3e-4, 4e-4),
    # The paper names no upper bound; later studies cap the ratio itself, at 4 to 8 (arXiv 2510.13786): 5 = 1 + 4.
    "cispo": Preset("arXiv 2506.13585", "group_mean", "group_std", "detached_clip", "token_mean", None, 4.0),
}


@dataclass(frozen=True)
class Algorithm:
    """The resolved parts. `normalizer_constant` is None where the longest response allowed is to be used."""

    advantage: AdvantageConfig
    policy_loss: PolicyLoss
    clip_low: float | None
    clip_high: float | None
    normalizer: Normalizer
    normalizer_constant: int | None
    importance: ImportanceConfig
    mismatch: MismatchConfig
    kl: KlConfig | None
    entropy_coefficient: float
    overlong_buffer: int


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The preset with the settings laid over it. Raises ConfigError for a setting without effect or out of range."""
    preset = PRESETS[config.preset]
    problems = list(_problems(config, preset))
    if problems:
        raise ConfigError("; ".join(problems))
    return Algorithm(
        advantage=config.advantage or AdvantageConfig(baseline=preset.baseline, scale=preset.scale),
        policy_loss=preset.policy_loss,
        clip_low=preset.clip_low if config.clip_low is None else config.clip_low,
        clip_high=preset.clip_high if config.clip_high is None else config.clip_high,
        normalizer=preset.normalizer,
        normalizer_constant=config.normalizer,
        importance=config.importance,
        mismatch=config.mismatch,
        kl=config.kl,
        entropy_coefficient=config.entropy_coefficient,
        overlong_buffer=config.overlong_buffer,
    )


def _problems(config: AlgorithmConfig, preset: Preset) -> Iterator[str]:
    if config.normalizer is not None and config.preset != "dr_grpo":
        yield _without_effect("normalizer", config, "only dr_grpo divides by a constant")
    if config.overlong_buffer and config.preset != "dapo":
        yield _without_effect("overlong_buffer", config, "only dapo shapes the reward by length")
    for name, bound in (("clip_low", config.clip_low), ("clip_high", config.clip_high)):
        if bound is None:
            continue
        if preset.policy_loss == "plain":
            yield _without_effect(name, config, "this preset clips no ratio")
        elif bound <= 0 or (name == "clip_low" and bound >= 1):
            limits = "between 0 and 1" if name == "clip_low" else "above 0"
            yield f"algorithm.{name} is {bound}: it must be {limits}"
    default = ImportanceConfig.model_fields["limit"].default
    if config.importance.type == "none" and config.importance.limit != default:
        yield "algorithm.importance.limit has no effect with algorithm.importance.type none: remove it or choose a type"


def _without_effect(name: str, config: AlgorithmConfig, reason: str) -> str:
    return f"algorithm.{name} has no effect with preset {config.preset}: {reason}; remove it or change the preset"
