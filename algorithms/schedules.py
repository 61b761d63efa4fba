"""What AC2 adapts as it trains: the upper clip, to a target entropy; the critic's learning rate, to its share of the change."""

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class EntropyControl:
    """Adaptive entropy control (AC2 equation 9): a constant step of the upper clip's offset toward the target entropy."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "target": (0, math.inf),
        "step": (0, math.inf),
        "minimum": (-math.inf, math.inf),
        "maximum": (-math.inf, math.inf),
        "initial": (-math.inf, math.inf),
    }

    target: float
    step: float
    minimum: float
    maximum: float
    initial: float

    def __post_init__(self) -> None:
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(f"algorithm.entropy.initial={self.initial}: must lie within minimum and maximum.")

    def next_offset(self, offset: float, entropy: float | None) -> float:
        """`clip(k + step x sign(target - entropy), minimum, maximum)`; unchanged without an entropy (no response from a prompt)."""
        if entropy is None or entropy == self.target:
            return offset
        direction = 1.0 if entropy < self.target else -1.0
        return min(max(offset + self.step * direction, self.minimum), self.maximum)


@dataclass(frozen=True)
class SelfCriticRate:
    """The critic's learning rate: halved, down to a floor, when its updates outweigh the actor's (AC2 Appendix C, Optimization)."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "initial": (0, 1),
        "floor": (0, 1),
        "ratio": (0, math.inf),
        "patience": (1, math.inf),
    }

    initial: float
    floor: float
    ratio: float
    patience: int

    def after_step(self, lr: float, streak: int, critic_change: float, actor_changes: float) -> tuple[float, int]:
        """The rate and the count of consecutive steps above the ratio, after a step with these norms of parameter changes."""
        streak = streak + 1 if critic_change > self.ratio * actor_changes else 0
        if streak < self.patience:
            return lr, streak
        return max(lr / 2, self.floor), 0
