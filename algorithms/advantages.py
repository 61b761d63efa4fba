"""Credit: within a group of continuations of one state, and along a response by the values of its states."""

from collections.abc import Sequence

import numpy as np

STD_EPSILON = 1e-6
JUDGE_FAILURES = ("zero", "leave_out")


def check_judge_failure(choice: str) -> None:
    """ValueError for what is none of the ways to treat a response that the judge could not score."""
    if choice not in JUDGE_FAILURES:
        raise ValueError(f"algorithm.judge_failure={choice}: use one of {', '.join(JUDGE_FAILURES)}.")


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


def gae(rewards: Sequence[np.ndarray], values: Sequence[np.ndarray], gamma: float, lambdas: np.ndarray) -> list[np.ndarray]:
    """Generalized advantage estimates of whole responses (Schulman et al., 2016); per response [tokens] -> [tokens].

    `A_t = delta_t + gamma lambda A_{t+1}` with `delta_t = r_t + gamma V_{t+1} - V_t`; nothing comes after the last token, cut
    off or not. `lambdas` [responses]. The value targets are `A_t + V_t`.
    """
    lengths = np.array([len(one) for one in rewards], int)
    longest = int(lengths.max(initial=0))
    r, v = np.zeros((2, len(lengths), longest + 1))
    for i, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        r[i, : len(reward)], v[i, : len(value)] = reward, value
    advantages = np.zeros_like(v)
    for t in reversed(range(longest)):  # padding has neither reward nor value, so what it passes on is 0
        advantages[:, t] = r[:, t] + gamma * v[:, t + 1] - v[:, t] + gamma * lambdas * advantages[:, t + 1]
    return [advantages[i, :length] for i, length in enumerate(lengths)]


def length_adaptive_lambdas(lengths: np.ndarray, alpha: float) -> np.ndarray:
    """`1 - 1 / (alpha l)`, not below 0: the same sum of weights per token for short and long responses (VAPO, Yue et al., 2025)."""
    return np.clip(1 - 1 / (alpha * np.maximum(lengths, 1)), 0.0, 1.0)
