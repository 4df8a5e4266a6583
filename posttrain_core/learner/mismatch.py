"""How far sampler and learner disagree about the tokens that are learned from, and when that is too far. No torch.

Legend: M learned tokens of one update, all ranks' and micro-batches'. The learner's log-probabilities are those of the
weights that the update starts from, which are the ones that sampled.
"""

from collections.abc import Mapping

import numpy as np

from posttrain_core.config import MismatchConfig
from posttrain_core.errors import PolicyMismatch
from posttrain_core.learner.samples import Floats

LARGEST_LOG_RATIO = 500.0  # keeps the estimate finite for a token that the sampler held impossible


def measure(sampler_M: Floats, learner_M: Floats) -> dict[str, float]:
    """Mean and largest absolute difference, an estimate of KL(sampler || learner) per token, and the effective sample
    size of the importance weights as a share of the tokens (Kong 1992).

    The estimate is k3 of Schulman, "Approximating KL divergence", 2020, tokens being drawn from the sampler:
    exp(r) - 1 - r with r = learner - sampler.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        log_ratio = learner_M - sampler_M
        weights = np.exp(log_ratio - log_ratio.max())
        kl = np.exp(np.minimum(log_ratio, LARGEST_LOG_RATIO)) - 1 - log_ratio
        return {
            "logprob_difference_mean": float(np.abs(log_ratio).mean()),
            "logprob_difference_max": float(np.abs(log_ratio).max()),
            "sampler_kl": float(kl.mean()),
            "ess_share": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
        }


def check(measured: Mapping[str, float], limits: MismatchConfig) -> None:
    """Raises PolicyMismatch, with the numbers, when one is beyond its limit, or when any of them is infinite or NaN."""
    bounds = (
        ("logprob_difference_mean", "max_mean_difference", limits.max_mean_difference, 1),
        ("sampler_kl", "max_kl", limits.max_kl, 1),
        ("ess_share", "min_ess_share", limits.min_ess_share, -1),
    )
    for name, setting, limit, sign in bounds:
        if limit is None or (_are_numbers(measured) and sign * measured[name] <= sign * limit):
            continue
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in measured.items())
        raise PolicyMismatch(
            f"sampler and learner disagree about the samples: {name} is {measured[name]:.4g}, "
            f"algorithm.mismatch.{setting} is {limit:g} ({numbers}). Nothing was learned from them. "
            f"{_advice(measured)} "
            f"To go on all the same, resume with --set algorithm.mismatch.{setting}=VALUE (null: no limit)"
        )


def _advice(measured: Mapping[str, float]) -> str:
    if _are_numbers(measured):
        return "Check that both hold the same weights, at the same precision, and recompute at the same temperature."
    return (
        "They hold values that are no numbers: the policy diverged (lower learner.learning_rate), or a sampler fails."
    )


def _are_numbers(measured: Mapping[str, float]) -> bool:
    return all(np.isfinite(value) for value in measured.values())
