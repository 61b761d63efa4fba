"""A step's metrics from its rollout groups, under verl's names."""

from typing import Any

import numpy as np

from algorithms.flops import DecodingCost


def rollout_metrics(rows: list[dict[str, Any]], cost: DecodingCost) -> dict[str, float]:
    """Scores, lengths, truncation and decoding cost of one step's credited rows; truncation is read from `finish_reason`.

    Refill rows, which only fill the replay buffer, count in the cost and in what the judge missed, and have a score of their own.
    """
    refill = [row for row in rows if row["purpose"] == "refill"]
    every_reward, every_length = _rewards(rows), _lengths(rows)
    metrics = {
        "reward/missing_fraction": float(np.isnan(every_reward).mean()),
        "decode/flops": float(cost.exact(np.array(_prompts(rows)), every_length)),
        "decode/tokens": float(every_length.sum()),
    }
    if refill:
        scores = _rewards(refill)
        metrics |= _spread("refill/score", scores[~np.isnan(scores)]) | _spread("refill/response_length", _lengths(refill))
    return metrics | _trained_metrics([row for row in rows if row["purpose"] != "refill"])


def _trained_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    rewards, lengths, prompts = _rewards(rows), _lengths(rows), np.array(_prompts(rows))
    advantages = np.array([a for row in rows for a in row["advantage"]])
    reasons = [reason for row in rows for reason in row["finish_reason"]]
    trained = np.array([mask for row in rows for mask in row["actor_mask"]])
    metrics = _spread("critic/score", rewards[~np.isnan(rewards)]) | _spread("critic/advantages", advantages)
    metrics |= _spread("response_length", lengths) | _spread("prompt_length", prompts)
    prefixes = np.array([len(row["prefix_ids"]) for row in rows])
    if prefixes.any():
        metrics |= _spread("prefix_length", prefixes) | {"prefix_length/empty_fraction": float((prefixes == 0).mean())}
    groups = [np.array([r for r in row["reward"] if r is not None]) for row in rows]
    return metrics | {
        "response_length/clip_ratio": float(np.mean([reason == "length" for reason in reasons])),
        "reward/flat_group_fraction": float(np.mean([len(g) == 0 or np.ptp(g) == 0 for g in groups])),
        "actor/masked_fraction": float(1 - trained.mean()),
        "training/groups": float(len(rows)),
    }


def _rewards(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([np.nan if r is None else r for row in rows for r in row["reward"]], dtype=float)


def _lengths(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([len(ids) for row in rows for ids in row["response_ids"]])


def _prompts(rows: list[dict[str, Any]]) -> list[int]:
    return [len(row["prompt_ids"]) + len(row["prefix_ids"]) for row in rows for _ in range(row["n"])]


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}
