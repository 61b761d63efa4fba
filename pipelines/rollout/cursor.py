"""Where a run stands in its dataset."""

from typing import Any

import numpy as np

from algorithms.types import Problem


class PromptCursor:
    """Problems in an order that is shuffled anew each epoch, by seed and epoch: each comes once per epoch."""

    def __init__(self, problems: list[Problem], seed: int, state: dict[str, Any] | None = None) -> None:
        state = state or {"epoch": 0, "place": 0, "drawn": 0}
        self._problems, self._seed = problems, seed
        self._epoch, self._place, self.drawn = state["epoch"], state["place"], state["drawn"]
        self._order = self._permutation()

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        taken = []
        for _ in range(count):
            if self._place == len(self._order):
                self._epoch, self._place = self._epoch + 1, 0
                self._order = self._permutation()
            taken.append(self._problems[self._order[self._place]])
            self._place += 1
        self.drawn += count
        return taken

    @property
    def epochs(self) -> float:
        """Passes over the dataset so far."""
        return self._epoch + self._place / len(self._problems)

    def state(self) -> dict[str, Any]:
        """JSON-ready, for checkpoints."""
        return {"epoch": self._epoch, "place": self._place, "drawn": self.drawn}

    def _permutation(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._problems))
