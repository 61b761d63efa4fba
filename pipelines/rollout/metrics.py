"""A step's metrics from its rollout groups, under verl's names."""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from algorithms.flops import DecodingCost
from algorithms.types import ObservedGroup

TOKENS = ("prompt_ids", "prefix_ids", "response_ids", "rollout_logprobs", "response_text", "reference_ids")


def nested_lengths(lists: pa.ChunkedArray) -> pa.Array:
    """The lengths of the inner lists, in their outer lists."""
    whole = lists.combine_chunks()
    return pa.ListArray.from_arrays(pc.subtract(whole.offsets, whole.offsets[0]), pc.list_value_length(whole.flatten()))


def light_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows without their tokens, whose number they have instead: as Python objects the tokens of a large step are gigabytes."""
    light = table.drop_columns([name for name in TOKENS if name in table.column_names])
    light = light.append_column("response_lengths", nested_lengths(table["response_ids"]))
    for name in ("prompt", "prefix"):
        light = light.append_column(f"{name}_length", pc.list_value_length(table[f"{name}_ids"]))
    return light.to_pylist()


def observed_groups(table: pa.Table) -> list[ObservedGroup]:
    """A step's groups as an algorithm's memory sees them; responses stay where they are until one is asked for."""
    responses = table["response_ids"].combine_chunks()
    rows = table.select(["problem_id", "purpose", "prefix_value", "critic_target", "reward", "return_std"]).to_pylist()

    def ids(name: str, i: int) -> np.ndarray:
        return table[name][i].values.to_numpy(zero_copy_only=False)

    def response(i: int, j: int) -> np.ndarray:
        return responses[i].values[j].values.to_numpy(zero_copy_only=False)

    return [
        ObservedGroup(
            problem_id=row["problem_id"],
            purpose=row["purpose"],
            prompt_ids=ids("prompt_ids", i),
            prefix_ids=ids("prefix_ids", i),
            prefix_value=_tenths(row["prefix_value"]),
            critic_target=_tenths(row["critic_target"]),
            rewards=np.array([np.nan if reward is None else reward for reward in row["reward"]], float),
            return_std=row["return_std"],
            response=partial(response, i),
        )
        for i, row in enumerate(rows)
    ]


def _tenths(value: float | None) -> float | None:
    return None if value is None else round(value, 1)  # what float32 made of a grid value


def rollout_metrics(rows: list[dict[str, Any]], cost: DecodingCost) -> dict[str, float]:
    """Scores, lengths, truncation and decoding cost of one step's light rows; truncation is read from `finish_reason`.

    Refill rows, which only fill the replay buffer, count in the cost and in what the judge missed, and have a score of their own.
    """
    refill = [row for row in rows if row["purpose"] == "refill"]
    every_reward, every_length = _rewards(rows), _lengths(rows)
    prompts = np.array(_prompts(rows))
    scored = np.array([owned for row in rows for owned in row["from_critic"]], bool)
    metrics = {
        "perf/total_num_tokens": float(prompts.sum() + every_length.sum()),
        "reward/missing_fraction": float((np.isnan(every_reward) & ~scored).sum() / max((~scored).sum(), 1)),
        "decode/flops": float(cost.exact(prompts, every_length)),
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
    completed = rewards[np.array([reason != "length" for reason in reasons]) & ~np.isnan(rewards)]
    metrics = _spread("critic/score", rewards[~np.isnan(rewards)]) | _spread("critic/advantages", advantages)
    metrics |= {"critic/score/completed_mean": float(completed.mean())} if len(completed) else {}
    if any(row["ask_critic"] for row in rows):
        metrics |= _critic_metrics(rows)
    metrics |= _spread("response_length", lengths) | _spread("prompt_length", prompts)
    prefixes = np.array([row["prefix_length"] for row in rows])
    if prefixes.any():
        metrics |= _spread("prefix_length", prefixes) | {"prefix_length/empty_fraction": float((prefixes == 0).mean())}
    return metrics | {
        "response_length/clip_ratio": float(np.mean([reason == "length" for reason in reasons])),
        "reward/flat_group_fraction": float(np.mean([_flat(row) for row in rows])),
        "actor/masked_fraction": float(1 - trained.mean()),
        "training/groups": float(len(rows)),
    }


def _flat(row: dict[str, Any]) -> bool:
    """Whether a group's ends are all worth the same, so that its continuations tell nothing apart."""
    ends = zip(row["from_critic"], row["endpoint_value"], row["reward"], strict=True)
    known = {value if owned else reward for owned, value, reward in ends} - {None}
    return len(known) < 2


def _critic_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Which endpoints the critic scored, how, and how often it gave no value."""
    owned = np.array([own for row in rows for own in row["from_critic"]])
    values = np.array([np.nan if value is None else value for row in rows for value in row["endpoint_value"]], float)[owned]
    metrics = {
        "ac2/endpoint_value_fraction": float(owned.mean()),
        "ac2/chunk_fraction": float(np.mean([row["chunk"] for row in rows])),
        "ac2/overlong_reference_fraction": float(np.mean([row["reference_left_out"] for row in rows])),
    }
    if len(values):
        metrics["ac2/invalid_endpoint_fraction"] = float(np.isnan(values).mean())
    return metrics | _spread("ac2/endpoint_value", values[~np.isnan(values)])


def _rewards(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([np.nan if r is None else r for row in rows for r in row["reward"]], dtype=float)


def _lengths(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([length for row in rows for length in row["response_lengths"]])


def _prompts(rows: list[dict[str, Any]]) -> list[int]:
    return [row["prompt_length"] + row["prefix_length"] for row in rows for _ in range(row["n"])]


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}
