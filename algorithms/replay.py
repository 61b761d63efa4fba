"""Replayed prefixes: states cut from stored rollouts, and the fresh rollouts that refill the store (AC2 3.1, Appendix C)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from algorithms.interface import PlanState
from algorithms.types import Problem, PromptRow, StoredTrajectory


@dataclass(frozen=True)
class Replay:
    """Where prefixes come from: a first-in-first-out buffer of complete rollouts, right or wrong."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "capacity": (1, math.inf),
        "refill_problems": (1, math.inf),
        "cut_grid": (1, math.inf),
        "max_cut_fraction": (0, 1),
        "refill_every": (1, math.inf),
        "least_reward": (-math.inf, math.inf),
    }

    capacity: int
    refill_problems: int
    cut_grid: int
    max_cut_fraction: float
    refill_every: int = 1
    least_reward: float | None = None

    def __post_init__(self) -> None:
        if self.max_cut_fraction == 1:
            raise ValueError("algorithm.replay.max_cut_fraction=1: must be below 1, or nothing is left to roll out.")

    def check_budget(self, max_new_tokens: int) -> None:
        """ValueError if no response could ever be cut."""
        if self.cut_grid > self.max_cut_fraction * max_new_tokens:
            raise ValueError(
                f"algorithm.replay.cut_grid={self.cut_grid}: not even a response of {max_new_tokens} tokens would ever be cut, so "
                "every prefix would be empty; lower it."
            )

    def refill(self, state: PlanState, budget: int) -> list[PromptRow]:
        """Fresh problems without replacement, one rollout each; they enter the buffer and no loss."""
        if (state.step - 1) % self.refill_every:
            return []
        return [PromptRow(problem, 1, budget, "refill") for problem in state.fresh_problems(self.refill_problems)]

    def states(self, state: PlanState, count: int) -> list[tuple[Problem, list[int]]]:
        """`count` problems with a prefix each: the buffer's distinct problems permuted and cycled through, one of a problem's
        trajectories at random, cut at random. While the buffer is empty fresh problems with empty prefixes stand in."""
        stored = self._by_problem(state)
        if not stored:
            return [(problem, []) for problem in state.fresh_problems(count)]
        order = state.rng.permutation(sorted(stored))
        chosen = [order[i % len(order)] for i in range(count)]
        return [(state.problem(problem_id), self._prefix(stored[problem_id], state)) for problem_id in chosen]

    def prefixes(self, state: PlanState, problem_id: str, count: int) -> list[list[int]]:
        """`count` separate prefixes of one problem's trajectories."""
        stored = self._by_problem(state).get(problem_id, [])
        return [self._prefix(stored, state) if stored else [] for _ in range(count)]

    def _by_problem(self, state: PlanState) -> dict[str, list[StoredTrajectory]]:
        stored: dict[str, list[StoredTrajectory]] = {}
        for trajectory in state.trajectories():
            stored.setdefault(trajectory.problem_id, []).append(trajectory)
        return stored

    def _prefix(self, choices: list[StoredTrajectory], state: PlanState) -> list[int]:
        trajectory = choices[state.rng.integers(len(choices))]
        return state.prefix(trajectory, self.cut(trajectory.length, state.rng))

    def cut(self, length: int, rng: np.random.Generator) -> int:
        """Uniform over the multiples of the grid in [0, `max_cut_fraction` x length]; 0 gives the empty prefix."""
        furthest = int(self.max_cut_fraction * length + 1e-9)  # 0.9 x 10 is 9, whatever binary fractions make of it
        return self.cut_grid * int(rng.integers(furthest // self.cut_grid + 1))
