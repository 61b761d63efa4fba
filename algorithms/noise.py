"""How noisy each prompt's returns are, and the critic's weights that make up for it (EasyPPO equation 7)."""

from __future__ import annotations

import math

import numpy as np


def return_std(rewards: np.ndarray) -> float | None:
    """Population standard deviation of a group's rewards, [n], NaN where there is none; None if fewer than two are known."""
    known = rewards[~np.isnan(rewards)]
    return float(known.std()) if len(known) > 1 else None


def noise_floor(reward_range: tuple[float, float], group_size: int) -> float:
    """`Delta / (2 sqrt(n))`: a group without spread weighs about twice one with a single other reward (EasyPPO section 4)."""
    low, high = reward_range
    return (high - low) / (2 * math.sqrt(group_size))


def noise_weights(stds: np.ndarray, floor: float) -> np.ndarray:
    """`w(s)`: the inverse of each prompt's return deviation, not below `floor`, with mean one over the batch; [prompts].

    A prompt whose spread is unknown (NaN) gets weight one, which leaves the others' mean where it is.
    """
    known = ~np.isnan(stds)
    weights = np.ones(len(stds))
    if known.any():
        inverse = 1 / np.maximum(stds[known], floor)
        weights[known] = inverse / inverse.mean()
    return weights


def inequality(weights: np.ndarray) -> tuple[float, float, float]:
    """How unequal weights are: mean, maximum, and the share of the tenth of prompts that weigh most; [prompts], not empty."""
    top = np.sort(weights)[-math.ceil(len(weights) / 10) :]
    return float(weights.mean()), float(weights.max()), float(top.sum() / weights.sum())
