"""Where the critic may be trusted: global and local readiness, and which ready problems are audited (AC2 3.1, Appendix C)."""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class ReadinessConfig:
    """Thresholds on the critic's error."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "global_threshold": (0, math.inf),
        "local_threshold": (0, math.inf),
        "window": (1, math.inf),
    }

    global_threshold: float
    local_threshold: float
    window: int
    local: bool = True
    partial_window: bool = True


@dataclass(frozen=True)
class PrefixError:
    """The critic at one sampled prefix, before the step's update."""

    problem_id: str
    prediction: float | None  # None: no grid value
    error: float | None  # None: there was no target to compare it with


@dataclass
class Readiness:
    """What has been seen of the critic so far. Once ready, a problem stays ready."""

    config: ReadinessConfig
    ready: set[str] = field(default_factory=set)
    last_error: dict[str, float] = field(default_factory=dict)
    nonzero: set[str] = field(default_factory=set)  # problems with a prediction above 0 at some step
    everything: bool = False  # every problem is ready: without local readiness, once the global error has been low
    recent: list[tuple[float, int]] = field(default_factory=list)  # error sum and prefixes of the newest complete steps

    def is_ready(self, problem_id: str) -> bool:
        """Whether the critic may score this problem's chunks."""
        return problem_id in self.ready or self.everything

    def global_error(self) -> float:
        """Mean error over every prefix of the newest complete steps; infinite before there is one."""
        prefixes = sum(count for _, count in self.recent)
        return sum(total for total, _ in self.recent) / prefixes if prefixes else math.inf

    def globally_ready(self) -> bool:
        seen = self.config.partial_window or len(self.recent) == self.config.window
        return seen and _below(self.global_error(), self.config.global_threshold)

    def complete_step(self, predictions: Sequence[PrefixError], solved: Container[str]) -> set[str]:
        """Take a step's predictions and return the problems that become ready.

        `solved` is the reference bank as it was before this step's additions. A problem whose prefixes were several in a step is
        remembered by their mean error.
        """
        by_problem: dict[str, list[float]] = {}
        for one in predictions:
            if one.error is not None:
                by_problem.setdefault(one.problem_id, []).append(one.error)
            if one.prediction:
                self.nonzero.add(one.problem_id)
        self.last_error |= {problem: float(np.mean(values)) for problem, values in by_problem.items()}
        errors = [error for values in by_problem.values() for error in values]
        self.recent = [*self.recent, (sum(errors), len(errors))][-self.config.window :]
        self.everything = self.everything or (self.globally_ready() and not self.config.local)
        if not self.globally_ready() or self.everything:
            return set()
        new = {
            problem
            for problem, error in self.last_error.items()
            if problem not in self.ready
            and _below(error, self.config.local_threshold)
            and problem in solved
            and problem in self.nonzero
        }
        self.ready |= new
        return new

    def state(self) -> dict[str, Any]:
        """JSON-ready, for checkpoints."""
        return {
            "ready": sorted(self.ready),
            "last_error": self.last_error,
            "nonzero": sorted(self.nonzero),
            "everything": self.everything,
            "recent": [list(one) for one in self.recent],
        }

    @classmethod
    def restored(cls, config: ReadinessConfig, state: dict[str, Any]) -> "Readiness":
        """From `state()`."""
        recent = [(total, count) for total, count in state["recent"]]
        found = cls(config, set(state["ready"]), dict(state["last_error"]), set(state["nonzero"]), state["everything"], recent)
        # A branch without local readiness begins where the critic already is as good as it asks.
        found.everything = found.everything or (not config.local and found.globally_ready())
        return found


def _below(error: float, threshold: float) -> bool:
    return error < threshold - 1e-9  # means of tenths are off by binary fractions, and a tie is not below


def audited(ready: Iterable[int], fraction: float, rng: np.random.Generator) -> set[int]:
    """Of the ready prefixes of a step, the `ceil(fraction x n)` that are rolled out to their end all the same."""
    candidates = list(ready)
    count = math.ceil(fraction * len(candidates) - 1e-9)
    return {candidates[i] for i in rng.permutation(len(candidates))[:count]}
