"""A step's metrics from its rollout groups, under verl's names; METRICS.md says what each is."""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from algorithms.flops import DecodingCost
from algorithms.types import Credit, ObservedGroup, further_fields

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


def observed_groups(table: pa.Table, credit_type: type[Credit]) -> list[ObservedGroup]:
    """A step's groups as an algorithm's memory sees them; responses stay where they are until one is asked for."""
    responses = table["response_ids"].combine_chunks()
    further = further_fields(credit_type)
    rows = table.select(["problem_id", "purpose", "prefix_value", "reward", *further]).to_pylist()

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
            prefix_value=None if row["prefix_value"] is None else round(row["prefix_value"], 1),  # a grid value, not float32's
            rewards=np.array([np.nan if reward is None else reward for reward in row["reward"]], float),
            credit={name: row[name] for name in further},
            response=partial(response, i),
        )
        for i, row in enumerate(rows)
    ]


def sample_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The first response of each group with its verdict, for people."""
    return [
        {"problem_id": row["problem_id"], "response": text, "reward": reward, "status": status}
        for row in table.to_pylist()
        for text, reward, status in zip(row["response_text"][:1], row["reward"][:1], row["reward_status"][:1], strict=True)
    ]


def rollout_metrics(rows: list[dict[str, Any]], cost: DecodingCost) -> dict[str, float]:
    """Scores, lengths, truncation and decoding cost of one step's light rows.

    Refill rows, which only fill the replay buffer, count in the cost and in what the judge missed, and have a score of their own.
    """
    refill = [row for row in rows if row["purpose"] == "refill"]
    every_reward, every_length = _rewards(rows), _lengths(rows)
    prompts = np.array(_prompts(rows))
    owned = _flags(rows, "self_scored")
    metrics = {
        "perf/total_num_tokens": float(prompts.sum() + every_length.sum()),
        "reward/missing_fraction": float((np.isnan(every_reward) & ~owned).sum() / max((~owned).sum(), 1)),
        "decode/flops": float(cost.exact(prompts, every_length)),
        "decode/tokens": float(every_length.sum()),
    }
    if refill:
        scores, lengths = _rewards(refill), _lengths(refill)
        metrics |= _spread(_known(scores), "refill/score/mean", "refill/score/max", "refill/score/min")
        metrics |= _spread(lengths, "refill/response_length/mean", "refill/response_length/max", "refill/response_length/min")
    return metrics | _trained_metrics([row for row in rows if row["purpose"] != "refill"])


def _trained_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    rewards, truncated = _rewards(rows), _flags(rows, "truncated")
    advantages = np.array([a for row in rows for a in row["advantages"]])
    completed = rewards[~truncated & ~np.isnan(rewards)]
    metrics = _spread(_known(rewards), "critic/score/mean", "critic/score/max", "critic/score/min")
    metrics |= _spread(advantages, "critic/advantages/mean", "critic/advantages/max", "critic/advantages/min")
    metrics |= {"critic/score/completed_mean": float(completed.mean())} if len(completed) else {}
    if any(row["ask_value"] for row in rows):
        metrics |= _self_critic_metrics(rows)
    metrics |= _spread(_lengths(rows), "response_length/mean", "response_length/max", "response_length/min")
    metrics |= _spread(np.array(_prompts(rows)), "prompt_length/mean", "prompt_length/max", "prompt_length/min")
    prefixes = np.array([row["prefix_length"] for row in rows])
    if prefixes.any():
        metrics |= _spread(prefixes, "prefix_length/mean", "prefix_length/max", "prefix_length/min")
        metrics["prefix_length/empty_fraction"] = float((prefixes == 0).mean())
    return metrics | {
        "response_length/clip_ratio": float(truncated.mean()),
        "reward/flat_group_fraction": float(np.mean([_flat(row) for row in rows])),
        "actor/masked_fraction": float(1 - _flags(rows, "actor_mask").mean()),
        "training/groups": float(len(rows)),
    }


def _flat(row: dict[str, Any]) -> bool:
    """Whether a group's ends are all worth the same, so that its continuations tell nothing apart."""
    ends = zip(row["self_scored"], row["endpoint_value"], row["reward"], strict=True)
    known = {value if owned else reward for owned, value, reward in ends} - {None}
    return len(known) < 2


def _self_critic_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Which endpoints the self-critic scored, how, and how often it gave no value."""
    owned = _flags(rows, "self_scored")
    values = np.array([np.nan if value is None else value for row in rows for value in row["endpoint_value"]], float)[owned]
    metrics = {
        "ac2/endpoint_value_fraction": float(owned.mean()),
        "ac2/chunk_fraction": float(np.mean([row["chunk"] for row in rows])),
        "ac2/overlong_reference_fraction": float(np.mean([row["reference_left_out"] for row in rows])),
    }
    if len(values):
        metrics["ac2/invalid_endpoint_fraction"] = float(np.isnan(values).mean())
    return metrics | _spread(_known(values), "ac2/endpoint_value/mean", "ac2/endpoint_value/max", "ac2/endpoint_value/min")


def _flags(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([flag for row in rows for flag in row[name]], bool)


def _rewards(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([np.nan if r is None else r for row in rows for r in row["reward"]], dtype=float)


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def _lengths(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([length for row in rows for length in row["response_lengths"]])


def _prompts(rows: list[dict[str, Any]]) -> list[int]:
    return [row["prompt_length"] + row["prefix_length"] for row in rows for _ in range(row["n"])]


def _spread(values: np.ndarray, mean: str, largest: str, least: str) -> dict[str, float]:
    """Mean, maximum and minimum under their names; nothing of nothing."""
    return {mean: float(values.mean()), largest: float(values.max()), least: float(values.min())} if len(values) else {}
