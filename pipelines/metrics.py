"""A step's metrics from its rollout groups, under verl's names."""

from typing import Any

import numpy as np

from algorithms.flops import DecodingCost


def rollout_metrics(rows: list[dict[str, Any]], cost: DecodingCost) -> dict[str, float]:
    """Scores, lengths, truncation and decoding cost of one step's credited rows; truncation is read from `finish_reason`."""
    rewards = np.array([np.nan if r is None else r for row in rows for r in row["reward"]], dtype=float)
    lengths = np.array([len(ids) for row in rows for ids in row["response_ids"]])
    prompts = np.array([len(row["prompt_ids"]) + len(row["prefix_ids"]) for row in rows for _ in range(row["n"])])
    advantages = np.array([a for row in rows for a in row["advantage"]])
    reasons = [reason for row in rows for reason in row["finish_reason"]]
    trained = np.array([mask for row in rows for mask in row["actor_mask"]])
    metrics = _spread("critic/score", rewards[~np.isnan(rewards)]) | _spread("critic/advantages", advantages)
    metrics |= _spread("response_length", lengths) | _spread("prompt_length", prompts)
    groups = [np.array([r for r in row["reward"] if r is not None]) for row in rows]
    return metrics | {
        "response_length/clip_ratio": float(np.mean([reason == "length" for reason in reasons])),
        "reward/missing_fraction": float(np.isnan(rewards).mean()),
        "reward/flat_group_fraction": float(np.mean([len(g) == 0 or np.ptp(g) == 0 for g in groups])),
        "actor/masked_fraction": float(1 - trained.mean()),
        "training/groups": float(len(rows)),
        "decode/flops": float(cost.exact(prompts, lengths)),
        "decode/tokens": float(lengths.sum()),
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}
