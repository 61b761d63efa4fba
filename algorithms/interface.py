"""What the loop offers an algorithm: the state it plans from, the learner it updates with, and the memory it may keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from algorithms.types import (
    Metrics,
    Problem,
    Recalled,
    Sample,
    StateLoss,
    Step,
    StoredTrajectory,
    TokenLoss,
)


class PlanState(Protocol):
    """What the coordinator lets `plan` see and draw from."""

    @property
    def round(self) -> int:
        """Which round of the step is being planned, from 0."""
        ...

    @property
    def step(self) -> int:
        """The step that is being planned, from 1."""
        ...

    @property
    def kept_groups(self) -> int:
        """Groups of this step that are already generated and kept (0 in its first round)."""
        ...

    @property
    def rng(self) -> np.random.Generator:
        """Randomness of this round; the same in a run that was interrupted and resumed."""
        ...

    @property
    def memory(self) -> Any:
        """What the algorithm made with `new_memory`."""
        ...

    def fresh_problems(self, count: int) -> list[Problem]:
        """The next `count` problems of the shuffled dataset, each once per epoch."""
        ...

    def problem(self, problem_id: str) -> Problem:
        """A problem of the dataset by its id."""
        ...

    def trajectories(self) -> list[StoredTrajectory]:
        """What the replay buffer holds, oldest first."""
        ...

    def prefix(self, trajectory: StoredTrajectory, cut: int) -> list[int]:
        """The first `cut` response tokens of a stored trajectory."""
        ...


class Learner(Protocol):
    """Models (`policy`, `reference`, `value`) and optimizers (`actor`, and those the algorithm asked for) by name.

    Every call is collective over the ranks. It knows no algorithm.
    """

    @property
    def batches(self) -> int:
        """Rollout batches received in this run, the one in hand included."""
        ...

    def receive(self, groups: Iterable[dict], forwards: Mapping[str, Callable[[Sample], bool]]) -> list[Sample]:
        """Take this rank's share of the step's groups as they arrive, and meanwhile run the models named on the samples picked.

        `policy` fills `old_logprobs` and `entropy`, `reference` fills `ref_logprobs`, `value` fills `values`.
        """
        ...

    def warmed(self, optimizer: str) -> int:
        """How far the warm-up of an optimizer's rate has come: its steps so far, or the earlier rollout batches that had any."""
        ...

    def minibatches(self, samples: list[Sample], count: int, balanced: bool = False) -> list[list[Sample]]:
        """Split the step's samples into `count` equal parts; each rank gets its members of each.

        The step's order is cut, so that groups stay together; `balanced` deals samples out by their length, so that the parts have
        about as many tokens and a group may be in several.
        """
        ...

    def step(
        self,
        optimizer: str,
        samples: list[Sample],
        loss: TokenLoss | StateLoss,
        *,
        aggregation: str = "token-mean",
        lr: float | None = None,
        temperature: float | None = None,
        weightless_tokens: int = 0,
        entropy_grad: bool = False,
        measure_change: bool = False,
    ) -> Step:
        """One step of an optimizer on a loss, aggregated over the tokens of all ranks (`losses.token_weight`).

        The actor's rate follows its schedule; other optimizers are given theirs. `temperature` is the sampling one unless given.
        `weightless_tokens` are tokens of this rank beyond the samples', which the denominators count.
        """
        ...

    def total(self, values: list[float]) -> list[float]:
        """Each number summed over all ranks."""
        ...

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all ranks, the same list on each."""
        ...

    def recall(self) -> Recalled:
        """What the algorithm's memory has for this update, once all groups of the step are in."""
        ...

    def remember(self, values: Metrics) -> None:
        """Leave values with the algorithm's memory, for the next steps."""
        ...


class Memory(Protocol):
    """What an algorithm keeps between steps outside the weights; lives in the coordinator, and checkpoints carry it."""

    def recall(self, rng: np.random.Generator) -> Recalled:
        """What the update of a step needs, for all ranks together."""
        ...

    def remember(self, values: Metrics) -> None:
        """Take what the update left."""
        ...

    def warnings(self) -> list[str]:
        """What a user should know."""
        ...

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """JSON-ready values and arrays, for a checkpoint."""
        ...

    def restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Become what `state` described."""
        ...
