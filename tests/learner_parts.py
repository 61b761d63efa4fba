"""What the tests of the trainer share: judged groups, their credit, and a learner on this rank."""

import dataclasses

import numpy as np
import torch
import torch.distributed as dist

from algorithms.base import Algorithm
from pipelines.trainer.config import ModelConfig, OptimizerConfig
from pipelines.trainer.learner import Learner
from tests.conftest import configure

OPTIMIZER = OptimizerConfig(
    lr=1e-3,
    betas=(0.9, 0.99),
    eps=1e-3,  # AdamW with a tiny epsilon divides rounding errors by themselves
    weight_decay=0.01,
    schedule="constant",
    warmup_steps=0,
    warmup_by="optimizer_step",
    clip_grad_norm=1.0,
    max_nonfinite_steps=2,
)
TEMPERATURE = 0.8


def make_groups() -> list[dict]:
    """Six groups of four, of many lengths, with prefixes; rollout log-probabilities a little off, one reward missing."""
    rng = np.random.default_rng(5)
    groups = []
    for i in range(6):
        responses = [rng.integers(8, 100, size=rng.integers(1, 40)).tolist() for _ in range(4)]
        rewards = rng.integers(0, 2, size=4).astype(float).tolist()
        groups.append(
            {
                "row_id": i,
                "n": 4,
                "purpose": "train",
                "self_scored": [False] * 4,
                "endpoint_value": [None] * 4,
                "prefix_value": None,
                "prompt_ids": rng.integers(8, 100, size=rng.integers(3, 12)).tolist(),
                "prefix_ids": rng.integers(8, 100, size=rng.integers(0, 9)).tolist(),
                "response_ids": responses,
                "rollout_logprobs": [(-4.6 + 0.3 * rng.standard_normal(len(r))).tolist() for r in responses],
                "reward": [None, *rewards[1:]] if i == 2 else rewards,
                "finish_reason": ["stop"] * 4,
                "truncated": [False] * 4,
            }
        )
    return groups


def credited(groups: list[dict], algorithm: Algorithm | None = None) -> list[dict]:
    """The groups with their credit; refills have one that teaches nothing."""
    from pipelines.rollout.stages import as_group, no_credit

    algorithm = algorithm or configure().algorithm
    found = []
    for group in groups:
        refill = group["purpose"] == "refill"
        credit = no_credit(algorithm.credit_type, group["n"], True) if refill else algorithm.credit(as_group(group))
        values = {field.name: getattr(credit, field.name) for field in dataclasses.fields(credit)}
        found.append(group | {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()})
    return found


def make_learner(folder: str, max_tokens: int, optimizer: OptimizerConfig = OPTIMIZER, **fields) -> Learner:
    return Learner(
        ModelConfig(folder, "float32", fields.pop("gradient_checkpointing", False)),
        optimizer,
        temperature=TEMPERATURE,
        horizon=40,
        max_tokens=max_tokens,
        device=torch.device("cpu"),
        **fields,
    )


def share(groups: list[dict]) -> list[dict]:
    """An uneven share for each rank: rank 0 gets all but the last group."""
    if dist.get_world_size() == 1:
        return groups
    return groups[:-1] if dist.get_rank() == 0 else groups[-1:]
