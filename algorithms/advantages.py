"""Credit within a group of continuations of one state."""

import numpy as np

STD_EPSILON = 1e-6


def group_advantages(rewards: np.ndarray, normalize_std: bool) -> np.ndarray:
    """`A_i = r_i - mean_j r_j`, over the group's standard deviation if asked; missing rewards (NaN) take no part and get 0.

    Shapes: [n] -> [n]. GRPO (Shao et al., 2024); without the deviation Dr. GRPO, and AC2 section 3.2 on terminal rewards.
    """
    valid = ~np.isnan(rewards)
    if valid.sum() < 2:
        return np.zeros_like(rewards)
    advantages = rewards - rewards[valid].mean()
    if normalize_std:
        advantages = advantages / (rewards[valid].std(ddof=1) + STD_EPSILON)
    return np.where(valid, advantages, 0.0)
