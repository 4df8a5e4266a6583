"""Presets resolve to their papers' parts, and settings without effect are refused."""

import pytest

from posttrain_core.config import AdvantageConfig, AlgorithmConfig, ImportanceConfig
from posttrain_core.errors import ConfigError
from posttrain_core.learner.presets import PRESETS, resolve


def test_every_preset_that_the_config_names_resolves() -> None:
    names = AlgorithmConfig.model_json_schema()["properties"]["preset"]["enum"]
    assert sorted(names) == sorted(PRESETS)
    for name in names:
        assert resolve(AlgorithmConfig(preset=name)).policy_loss == PRESETS[name].policy_loss


def test_settings_lie_over_the_preset() -> None:
    advantage = AdvantageConfig(baseline="leave_one_out", scale="none")
    algorithm = resolve(AlgorithmConfig(preset="dapo", advantage=advantage, clip_high=0.4, overlong_buffer=4))
    assert (algorithm.advantage, algorithm.clip_low, algorithm.clip_high) == (advantage, 0.2, 0.4)
    assert (algorithm.normalizer, algorithm.overlong_buffer) == ("token_mean", 4)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"preset": "grpo", "normalizer": 10}, "algorithm.normalizer"),
        ({"preset": "gspo", "overlong_buffer": 4}, "algorithm.overlong_buffer"),
        ({"preset": "rloo", "clip_low": 0.1}, "algorithm.clip_low"),
        ({"preset": "reinforce", "clip_high": 0.1}, "algorithm.clip_high"),
        ({"preset": "grpo", "clip_low": 1.5}, "between 0 and 1"),
        ({"preset": "grpo", "clip_high": -0.1}, "above 0"),
        ({"importance": ImportanceConfig(type="none", limit=3.0)}, "algorithm.importance.limit"),
    ],
)
def test_a_setting_without_effect_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve(AlgorithmConfig.model_validate(settings))
