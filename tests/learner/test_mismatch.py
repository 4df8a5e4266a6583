"""The numbers that compare sampler and learner, and the gate."""

import math

import numpy as np
import pytest

from posttrain_core.config import MismatchConfig
from posttrain_core.errors import PolicyMismatch
from posttrain_core.learner.mismatch import check, measure

NOTHING = MismatchConfig(max_mean_difference=None, max_kl=None, min_ess_share=None)


def measured(*log_ratios: float) -> dict[str, float]:
    sampler = np.log(np.full(len(log_ratios), 0.25))
    return measure(sampler, sampler + np.array(log_ratios))


def test_numbers_by_hand() -> None:
    values = measured(0.0, math.log(2), -math.log(2))
    assert values["logprob_difference_mean"] == pytest.approx(2 * math.log(2) / 3)
    assert values["logprob_difference_max"] == pytest.approx(math.log(2))
    assert values["sampler_kl"] == pytest.approx((1 - math.log(2) - 0.5 + math.log(2)) / 3)
    assert values["ess_share"] == pytest.approx(3.5**2 / (3 * (1 + 4 + 0.25)))


def test_the_estimate_is_the_divergence_of_the_learner_from_the_sampler() -> None:
    sampler, learner = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    drawn = np.random.default_rng(0).choice(3, size=200_000, p=sampler)
    estimate = measure(np.log(sampler)[drawn], np.log(learner)[drawn])["sampler_kl"]
    assert estimate == pytest.approx(float((sampler * np.log(sampler / learner)).sum()), rel=0.02)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_mean_difference": 0.4}, "logprob_difference_mean is 0.5, algorithm.mismatch.max_mean_difference is 0.4"),
        ({"max_kl": 0.1}, "sampler_kl is 0.1276, algorithm.mismatch.max_kl is 0.1"),
        ({"min_ess_share": 0.9}, "ess_share is 0.824, algorithm.mismatch.min_ess_share is 0.9"),
    ],
)
def test_each_limit_stops_and_says_what_to_do(limits: dict[str, float], named: str) -> None:
    values = measured(0.5, -0.5)
    check(values, NOTHING)
    with pytest.raises(PolicyMismatch, match="resume with --set") as caught:
        check(values, NOTHING.model_copy(update=limits))
    assert named in str(caught.value)
    assert not caught.value.retryable


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("setting", ["max_mean_difference", "max_kl", "min_ess_share"])
def test_what_is_no_number_is_beyond_every_limit(value: float, setting: str) -> None:
    limits = NOTHING.model_copy(update={setting: 0.5})
    with pytest.raises(PolicyMismatch, match="no numbers"):
        check(measured(0.0, value), limits)
