"""One optimizer step over sharded weights: gradients micro-batch by micro-batch, clipped, applied or skipped on all ranks alike."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from algorithms.types import Metrics, OptimizerSpec, Sample
from pipelines.trainer.batching import microbatches
from pipelines.trainer.collectives import Ranks
from pipelines.trainer.policy import sync_gradients


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


def accumulate(
    module: nn.Module, samples: list[Sample], max_tokens: int, ranks: Ranks, objective: Callable[[list[Sample]], Tensor]
) -> None:
    """Gradients of the sum of an objective over micro-batches and ranks, in lockstep: a rank without a batch brings an empty one.

    The objective's weights count all ranks, and FSDP averages over them, so it is scaled by their number.
    """
    batches = microbatches(samples, max_tokens)
    (rounds,) = ranks.largest([len(batches)])
    for i in range(int(rounds)):
        sync_gradients(module, i == int(rounds) - 1)
        (objective(batches[i] if i < len(batches) else []) * ranks.count).backward()


@dataclass(frozen=True)
class Applied:
    """What came of the gradients of one step."""

    grad_norm: float  # before clipping; 0 where it was skipped
    skipped: bool
    change: float  # norm of the parameters' change; 0 unless it was asked for


class Optimizer:
    """AdamW with a clipped norm, which takes no step whose loss or gradient is not finite."""

    def __init__(self, module: nn.Module, spec: OptimizerSpec, max_nonfinite_steps: int) -> None:
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.clip_grad_norm, self.max_nonfinite_steps = spec.clip_grad_norm, max_nonfinite_steps
        self.adamw = torch.optim.AdamW(self.parameters, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
        self.nonfinite_in_a_row = 0

    def apply(self, lr: float, loss: float, measure_change: bool = False) -> Applied:
        """Clip and update, or skip: norm and `loss` are of all ranks, so every rank decides the same."""
        grad_norm = _whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_grad_norm))
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        before = [parameter.detach().clone() for parameter in self.parameters] if measure_change and finite else []
        if finite:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        changes = [new.detach() - old for new, old in zip(self.parameters, before, strict=False)]
        change = _whole(torch.nn.utils.get_total_norm(changes)) if changes else 0.0
        self.adamw.zero_grad(set_to_none=True)
        self.nonfinite_in_a_row = 0 if finite else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row >= self.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self.nonfinite_in_a_row} optimizer steps in a row had a non-finite loss ({loss}) or gradient ({grad_norm}); "
                "nothing of them was applied: lower the learning rate or look at the last sample rollouts."
            )
        return Applied(grad_norm if finite else 0.0, not finite, change)


class Meter:
    """Sums what a loss logs over micro-batches, then over ranks: token means, and maxima for names ending in "max"."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.device = ranks, ranks.device
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.values: dict[str, Tensor] = {}

    def add(self, per_token: Tensor, weight: Tensor, logged: dict[str, Tensor]) -> None:
        """Take a micro-batch's losses, their weights and what else is logged, all [tokens]."""
        self.loss_sum += (per_token.detach() * weight).sum()
        for name, value in logged.items():
            value = value.detach().double()
            if name.endswith("max"):
                before = self.values.get(name, torch.full((), -math.inf, dtype=torch.float64, device=self.device))
                self.values[name] = torch.maximum(before, value.max()) if len(value) else before
            else:
                self.values[name] = self.values.get(name, torch.zeros((), dtype=torch.float64, device=self.device)) + value.sum()

    def loss(self) -> float:
        """The loss of all ranks."""
        return self.ranks.total([float(self.loss_sum)])[0]

    def means(self, tokens: int) -> Metrics:
        """What was logged, over all ranks and their number of tokens."""
        names = sorted(self.values)
        maxima = [name for name in names if name.endswith("max")]
        means = [name for name in names if not name.endswith("max")]
        summed = self.ranks.total([float(self.values[name]) for name in means])
        return dict(zip(means, (value / tokens for value in summed), strict=True)) | dict(
            zip(maxima, self.ranks.largest([float(self.values[name]) for name in maxima]), strict=True)
        )


def column(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    """The arrays of a micro-batch's samples as one float32 tensor."""
    whole = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.float32)
    return torch.as_tensor(np.ascontiguousarray(whole), dtype=torch.float32, device=device)


def _whole(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
