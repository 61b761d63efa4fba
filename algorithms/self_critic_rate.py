"""The self-critic's learning rate, which follows its share of the change (AC2 Appendix C, Optimization)."""

import math
from dataclasses import dataclass
from typing import ClassVar


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
    restart_streak: bool  # whether a halving begins the count of steps anew

    def after_step(self, lr: float, streak: int, critic_change: float, actor_changes: float) -> tuple[float, int]:
        """The rate and the count of consecutive steps above the ratio, after a step with these norms of parameter changes."""
        streak = streak + 1 if critic_change > self.ratio * actor_changes else 0
        if streak < self.patience:
            return lr, streak
        return max(lr / 2, self.floor), 0 if self.restart_streak else streak
