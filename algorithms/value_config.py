"""The settings of a value model and its update, with their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from algorithms.noise import noise_floor

if TYPE_CHECKING:
    from algorithms.value_heads import ValueHead

Range = tuple[float, float]
MARGIN = 0.1  # by which the bins of an HL-Gauss head reach beyond the rewards, and
BANDWIDTH = 0.75  # its bandwidth in bins, unless they are given (EasyPPO Table 5)


@dataclass(frozen=True)
class CategoricalConfig:
    """The bins of an HL-Gauss head."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "bins": (2, math.inf),
        "support": (-1e30, 1e30),
        "bandwidth": (1e-12, math.inf),
    }

    bins: int
    support: tuple[float, float] | None
    bandwidth: float | None

    def resolved(self, reward_range: Range | None) -> tuple[Range, float]:
        """Support and bandwidth; ValueError if they follow from a range of rewards that is not known."""
        support = self.support
        if support is None:
            if reward_range is None:
                raise ValueError("algorithm.critic.categorical.support=null needs task.reward_range=[low,high] to follow from.")
            support = round(reward_range[0] - MARGIN, 9), round(reward_range[1] + MARGIN, 9)
        width = (support[1] - support[0]) / max(self.bins - 1, 1)
        return support, BANDWIDTH * width if self.bandwidth is None else self.bandwidth


@dataclass(frozen=True)
class ValueModelConfig:
    """The value model and its update."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "lr": (0, 1),
        "lr_warmup_steps": (0, math.inf),
        "betas": (0, 0.999999999),
        "eps": (0, 1),
        "weight_decay": (0, math.inf),
        "clip_grad_norm": (1e-12, math.inf),
        "minibatches": (1, math.inf),
        "epochs": (1, math.inf),
        "value_clip": (1e-12, math.inf),
        "warmup_steps": (0, math.inf),
        "warmup_lambda": (0, 1),
        "noise_floor": (1e-12, math.inf),
        "head_seed": (0, 2**31 - 1),
    }

    path: str | None
    lr: float
    scale_lr: bool
    lr_warmup_steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad_norm: float
    minibatches: int  # K
    epochs: int
    value_clip: float | None
    warmup_steps: int
    warmup_lambda: float | None
    noise_normalization: bool
    noise_floor: float | None
    categorical: CategoricalConfig | None = None
    head_seed: int | None = None

    def head(self, reward_range: Range | None) -> ValueHead:
        """What the value model says of a state."""
        from algorithms.value_heads import HLGauss, ScalarHead

        if self.categorical is None:
            return ScalarHead(self.value_clip)
        return HLGauss(self.categorical.bins, *self.categorical.resolved(reward_range))

    def floor(self, reward_range: Range | None, group_size: int) -> float:
        """The least return deviation that counts (section 4)."""
        if self.noise_floor is not None:
            return self.noise_floor
        assert reward_range is not None
        return noise_floor(reward_range, group_size)

    def check(self, reward_range: Range | None, group_size: int) -> None:
        """ValueError if noise normalisation or the bins cannot work with these rewards and groups."""
        if self.categorical is not None:
            low, high = self.categorical.resolved(reward_range)[0]
            if reward_range is not None and (reward_range[0] < low or reward_range[1] > high):
                raise ValueError(
                    f"algorithm.critic.categorical.support={[low, high]} does not cover task.reward_range={list(reward_range)}: "
                    "widen it."
                )
        if not self.noise_normalization:
            return
        if group_size < 2:
            raise ValueError(
                "algorithm.critic.noise_normalization needs the spread of a prompt's returns: set algorithm.group_size to 2 or "
                "more."
            )
        if self.noise_floor is None and reward_range is None:
            raise ValueError(
                "algorithm.critic.noise_normalization has no floor: give algorithm.critic.noise_floor, or "
                "task.reward_range=[low,high] to derive it from."
            )
