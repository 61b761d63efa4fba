"""Adaptive entropy control: the upper clip follows the entropy of responses from the prompt (AC2 Appendix C, equation 9)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from algorithms.interface import Learner
from algorithms.types import Metrics, Recalled, Sample


@dataclass(frozen=True)
class EntropyControl:
    """A constant step of the upper clip's offset toward the target entropy."""

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


def prompt_entropy(learner: Learner, batch: list[Sample]) -> float | None:
    """Mean entropy per token of responses with an empty prefix, over all ranks; None if there is none."""
    own = [sample.entropy for sample in batch if sample.from_prompt and sample.entropy is not None]
    total, tokens = learner.total([float(sum(one.sum() for one in own)), float(sum(map(len, own)))])
    return total / tokens if tokens else None


def schedule_metrics(clip_high: float, entropy: float | None) -> Metrics:
    """What the control logs of a step."""
    return {"actor/clip_high": clip_high} | ({"actor/prompt_entropy": entropy} if entropy is not None else {})


class EntropyMemory:
    """The memory of an algorithm that remembers the offset alone; it persists over steps and checkpoints."""

    def __init__(self, initial: float) -> None:
        self.clip_offset = initial

    def recall(self, rng: np.random.Generator) -> Recalled:
        return Recalled({"clip_offset": self.clip_offset}, [], 0.0)

    def remember(self, values: Metrics) -> None:
        self.clip_offset = values["clip_offset"]

    def warnings(self) -> list[str]:
        return []

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {"clip_offset": self.clip_offset}, {}

    def restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.clip_offset = values["clip_offset"]
