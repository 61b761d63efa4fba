"""What a critic's head says of a state, and its loss: a number (PPO), or a distribution over bins (HL-Gauss).

A head's outputs have shape [tokens, outputs], its values and losses [tokens].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScalarHead:
    """One number; squared error, clipped around the old value (EasyPPO Table 2)."""

    clip: float | None  # how far a value may move from the old one before its gradient ends; None: any way
    outputs: int = 1

    def values(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0]

    def loss(self, outputs: Tensor, old_values: Tensor, returns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2`, and what is worth logging."""
        values = self.values(outputs)
        error = (values - returns).square()
        if self.clip is None:
            return error / 2, {}
        near = torch.maximum(torch.minimum(values, old_values + self.clip), old_values - self.clip)
        clipped = (near - returns).square()
        return torch.maximum(error, clipped) / 2, {"critic/vf_clipfrac": (clipped > error).float()}


@dataclass(frozen=True)
class HLGauss:
    """A categorical head over bins whose centres span the support, ends included (Farebrother et al., 2024; EasyPPO Table 5).

    Table 5's bandwidths are 0.75 of the distance between centres if centres, and not edges, end at the support.
    """

    bins: int
    support: tuple[float, float]
    bandwidth: float

    def __post_init__(self) -> None:
        low, high = self.support
        if self.bins < 2 or low >= high or self.bandwidth <= 0:
            raise ValueError(
                f"algorithm.critic.categorical: bins={self.bins}, support={list(self.support)}, bandwidth={self.bandwidth}: "
                "needs at least 2 bins, a rising support and a bandwidth above 0."
            )

    @property
    def outputs(self) -> int:
        return self.bins

    def centres(self, like: Tensor) -> Tensor:
        return torch.linspace(*self.support, self.bins, dtype=like.dtype, device=like.device)

    def values(self, outputs: Tensor) -> Tensor:
        """The expectation over bins."""
        return outputs.softmax(-1) @ self.centres(outputs)

    def target(self, returns: Tensor) -> Tensor:
        """A Gaussian around each return, integrated over the bins and normalised on them; [tokens] -> [tokens, bins]."""
        exact = returns.double()  # differences of nearly equal integrals
        half = (self.support[1] - self.support[0]) / (self.bins - 1) / 2
        edges = torch.linspace(
            self.support[0] - half, self.support[1] + half, self.bins + 1, dtype=exact.dtype, device=exact.device
        )
        below = torch.special.erf((edges - exact[:, None]) / (math.sqrt(2) * self.bandwidth))
        mass = below.diff(dim=-1)
        return (mass / (below[:, -1:] - below[:, :1])).to(returns.dtype)

    def loss(self, outputs: Tensor, old_values: Tensor, returns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy against the smoothed target; ValueError with the range seen if a return lies outside the bins."""
        low, high = self.support
        least, most = (float(returns.min()), float(returns.max())) if len(returns) else (low, high)
        if least < low or most > high:
            raise ValueError(
                f"algorithm.critic.categorical.support={list(self.support)} does not cover returns from {least:g} to {most:g}: "
                "widen it."
            )
        return -(self.target(returns) * outputs.log_softmax(-1)).sum(-1), {}


ValueHead = ScalarHead | HLGauss
