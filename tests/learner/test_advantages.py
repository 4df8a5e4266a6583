"""Advantages against values worked out by hand."""

import pytest

from posttrain_core.config import AdvantageConfig
from posttrain_core.learner.advantages import advantages, overlong_penalty

ONE_GROUP = ["g"] * 4
ALL = [True] * 4


def config(baseline: str, scale: str) -> AdvantageConfig:
    return AdvantageConfig.model_validate({"baseline": baseline, "scale": scale})


def test_masked_rollouts_do_not_bend_the_group() -> None:
    values = advantages([1, 1, 0, 0], ONE_GROUP, [True, False, True, True], config("group_mean", "none"))
    assert values == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])


def test_the_reward_of_a_masked_rollout_is_never_looked_at() -> None:
    for scale in ("group_std", "batch_std"):
        for baseline in ("group_mean", "leave_one_out", "batch_mean"):
            scored = [True, False, True, True]
            usual = advantages([1, 1, 0, 0], ONE_GROUP, scored, config(baseline, scale))
            assert usual == advantages([1, 1e9, 0, 0], ONE_GROUP, scored, config(baseline, scale))


def test_group_std_is_the_sample_standard_deviation() -> None:
    # mean 2, squared differences 4 + 0 + 0 + 4, over n - 1 = 3
    values = advantages([0, 2, 2, 4], ONE_GROUP, ALL, config("group_mean", "group_std"))
    assert values == pytest.approx([-2 / (8 / 3) ** 0.5, 0, 0, 2 / (8 / 3) ** 0.5])


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    values = advantages([1, 0, 0, 3], ONE_GROUP, ALL, config("leave_one_out", "none"))
    assert values == pytest.approx([1 - 3 / 3, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3])


def test_batch_baseline_and_scale_go_over_groups() -> None:
    values = advantages([1, 1, 0, 0], ["a", "b", "a", "b"], ALL, config("batch_mean", "batch_std"))
    deviation = (4 * 0.25 / 3) ** 0.5
    assert values == pytest.approx([0.5 / deviation, 0.5 / deviation, -0.5 / deviation, -0.5 / deviation])


def test_groups_are_independent_and_need_not_be_adjacent() -> None:
    values = advantages([1, 10, 0, 30], ["a", "b", "a", "b"], ALL, config("group_mean", "none"))
    assert values == pytest.approx([0.5, -10, -0.5, 10])


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group_std", "none"])
def test_a_group_without_variance_teaches_nothing(baseline: str, scale: str) -> None:
    # The mean of three 0.1 is not 0.1 in floating point: the zeros must be exact all the same.
    assert advantages([0.1] * 3, ["g"] * 3, [True] * 3, config(baseline, scale)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "batch_mean"])
def test_a_lone_rollout_teaches_nothing(baseline: str) -> None:
    assert advantages([1.0, 5.0], ["g", "g"], [True, False], config(baseline, "group_std")) == [0.0, 0.0]


def test_no_baseline_leaves_the_reward() -> None:
    assert advantages([2, 3], ["g", "g"], [True, False], config("none", "none")) == [2.0, 0.0]


@pytest.mark.parametrize(("tokens", "penalty"), [(10, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (25, -1)])
def test_overlong_penalty_is_linear_in_the_buffer(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, max_new_tokens=20, buffer=4) == penalty


def test_overlong_penalty_can_be_off() -> None:
    assert overlong_penalty(20, max_new_tokens=20, buffer=0) == 0.0
