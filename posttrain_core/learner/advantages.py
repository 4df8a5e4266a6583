"""Advantages from rewards: pure functions of arrays, no torch.

Legend: N rollouts of one iteration, in any order. Only scored rollouts take part in any statistic; the others get 0.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posttrain_core.config import AdvantageConfig

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def advantages(
    rewards: Sequence[float], group_ids: Sequence[str], scored: Sequence[bool], config: AdvantageConfig
) -> list[float]:
    """The advantage of each rollout (N floats): (reward - baseline) / scale.

    Rewards 1, 1, 0, 0 of one group, the second not scored, baseline group_mean, scale none: 2/3, 0, -1/3, -1/3.
    """
    rewards_N, scored_N = np.asarray(rewards, dtype=np.float64), np.asarray(scored, dtype=np.bool_)
    groups = _groups(group_ids)
    centred = _centred(rewards_N, groups, scored_N, config)
    scaled = _scaled(centred, rewards_N, groups, scored_N, config)
    return [float(value) for value in np.where(scored_N, scaled, 0.0)]


def overlong_penalty(num_response_tokens: int, max_new_tokens: int, buffer: int) -> float:
    """Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13), to be added to the reward.

    0 up to `max_new_tokens - buffer` tokens, from there linearly down to -1 at `max_new_tokens`. A buffer of 0 is off.
    """
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (num_response_tokens - (max_new_tokens - buffer)) / buffer))


def _groups(group_ids: Sequence[str]) -> list[NDArray[np.int64]]:
    """The positions of each group, groups by first appearance."""
    members: dict[str, list[int]] = {}
    for position, group in enumerate(group_ids):
        members.setdefault(group, []).append(position)
    return [np.array(positions, dtype=np.int64) for positions in members.values()]


def _centred(rewards: Floats, groups: list[NDArray[np.int64]], scored: Bools, config: AdvantageConfig) -> Floats:
    if config.baseline == "none":
        return rewards.copy()
    centred = np.zeros_like(rewards)
    parts = [np.arange(len(rewards))] if config.baseline == "batch_mean" else groups
    for part in parts:
        chosen = part[scored[part]]
        if not _varies(rewards[chosen]):
            continue
        difference = rewards[chosen] - rewards[chosen].mean()
        if config.baseline == "leave_one_out":  # r - mean(others) = n / (n - 1) * (r - mean(all))
            difference *= len(chosen) / (len(chosen) - 1)
        centred[chosen] = difference
    return centred


def _scaled(
    centred: Floats, rewards: Floats, groups: list[NDArray[np.int64]], scored: Bools, config: AdvantageConfig
) -> Floats:
    if config.scale == "none":
        return centred
    scaled = np.zeros_like(centred)
    parts = [np.arange(len(rewards))] if config.scale == "batch_std" else groups
    for part in parts:
        chosen = part[scored[part]]
        if _varies(rewards[chosen]):
            scaled[chosen] = centred[chosen] / rewards[chosen].std(ddof=1)
    return scaled


def _varies(rewards: Floats) -> bool:
    """Compared by value: the standard deviation of equal floats need not round to 0."""
    return len(rewards) > 1 and bool(rewards.max() > rewards.min())
