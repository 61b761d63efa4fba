"""A step's metrics from its rollout groups, under verl's names; METRICS.md says what each is."""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from algorithms.flops import DecodingCost
from algorithms.types import Credit, ObservedGroup, further_fields

ENDS = ("self_scored", "endpoint_value", "reward")
CLOSE = 1e-6  # rewards are kept as float32
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


def rollout_metrics(
    rows: list[dict[str, Any]], cost: DecodingCost, reward_range: tuple[float, float] | None = None
) -> dict[str, float]:
    """Scores, lengths, truncation and decoding cost of one step's light rows; `reward_range` says when a problem is solved.

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
        "decode/flops_from_means": cost.from_means(len(prompts), prompts.mean(), np.maximum(every_length - 1, 0).mean()),
        "decode/tokens": float(every_length.sum()),
    }
    if refill:
        scores, lengths = _rewards(refill), _lengths(refill)
        metrics |= _spread(_known(scores), "refill/score/mean", "refill/score/max", "refill/score/min")
        metrics |= _spread(lengths, "refill/response_length/mean", "refill/response_length/max", "refill/response_length/min")
    return metrics | _trained_metrics([row for row in rows if row["purpose"] != "refill"], reward_range)


def _trained_metrics(rows: list[dict[str, Any]], reward_range: tuple[float, float] | None) -> dict[str, float]:
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
        **_group_fractions(rows, reward_range or (0.0, 1.0)),
        "actor/masked_fraction": float(1 - _flags(rows, "actor_mask").mean()),
        "training/groups": float(len(rows)),
    }


def nothing_learnt(metrics: dict[str, float]) -> list[str]:
    """Why a step taught the actor nothing, or a part of it did not; from the step's metrics."""
    step, groups = metrics.get("training/global_step", 0.0), metrics.get("training/groups", 0.0)
    if groups and metrics.get("training/filter_groups/dropped") == groups:
        solved, unsolved = metrics["reward/frac_solved"], metrics["reward/frac_unsolved"]
        return [
            f"step {step:.0f}: dynamic sampling kept none of {groups:.0f} groups, as the rewards within each were equal ("
            f"{solved:.0%} solved, {unsolved:.0%} unsolved), so the actor learnt nothing; the problems may be too easy or too hard"
        ]
    if metrics.get("actor/empty_minibatches"):
        return [
            f"step {step:.0f}: an actor minibatch had no response to learn from (all truncated and filtered, or without a reward), "
            "so its step was skipped"
        ]
    return []


def _group_fractions(rows: list[dict[str, Any]], reward_range: tuple[float, float]) -> dict[str, float]:
    """Groups whose ends are all worth the same, so that they tell nothing apart, and those of them at the range's ends."""
    worth = [
        {value if owned else reward for owned, value, reward in zip(*(row[name] for name in ENDS), strict=True)} - {None}
        for row in rows
    ]
    low, high = reward_range
    return {
        "reward/frac_reward_zero_std": float(np.mean([len(known) < 2 for known in worth])),
        "reward/frac_solved": float(np.mean([bool(known) and min(known) >= high - CLOSE for known in worth])),
        "reward/frac_unsolved": float(np.mean([bool(known) and max(known) <= low + CLOSE for known in worth])),
    }


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
