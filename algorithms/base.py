"""The base class of every algorithm: three verbs, and defaults for all that most algorithms do not need."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from algorithms.interface import Learner, Memory, PlanState
from algorithms.replay import Replay
from algorithms.types import Credit, Group, Metrics, ObservedGroup, OptimizerSpec, PromptRow, ValueModelSpec

if TYPE_CHECKING:
    from algorithms.self_critic import SelfCriticPrompt


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """What to roll out (`plan`), how to credit it (`credit`), and how to learn from it (`update`)."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "problems_per_step": (1, math.inf),
        "group_size": (1, 1 << 16),
        "max_new_tokens": (1, math.inf),
    }

    credit_type: ClassVar[type[Credit]] = Credit
    self_critic_asked: ClassVar[bool] = False  # whether the model is asked for the values of states

    name: str
    problems_per_step: int
    group_size: int
    max_new_tokens: int
    replay: Replay | None = None

    @property
    def trains_on_refills(self) -> bool:
        """Whether `update` wants the rollouts that refill the replay buffer."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether `update` reads the log-probabilities of the initial model."""
        return False

    @property
    def value_model(self) -> ValueModelSpec | None:
        """The value model, if there is one."""
        return None

    @property
    def optimizers(self) -> Mapping[str, OptimizerSpec]:
        """The optimizers beside the actor's, by name."""
        return {}

    def new_memory(self, prompt: SelfCriticPrompt | None, context_limit: int) -> Memory | None:
        """What it remembers between steps, as a new run begins; None if nothing.

        `prompt` asks the model for values, in contexts of up to `context_limit` tokens, where `self_critic_asked`.
        """
        return None

    def plan(self, state: PlanState) -> list[PromptRow]:
        """The rows of one round of a step; none when the step needs no more. By default one round."""
        return self.plan_groups(state, self.problems_per_step) if state.round == 0 else []

    def plan_groups(self, state: PlanState, count: int) -> list[PromptRow]:
        """`count` groups from fresh problems or replayed prefixes, with the step's refills before its first round.

        The response budget counts the prefix.
        """
        if self.replay is None:
            return [PromptRow(problem, self.group_size, self.max_new_tokens) for problem in state.fresh_problems(count)]
        refill = self.replay.refill(state, self.max_new_tokens) if state.round == 0 else []
        return refill + [
            PromptRow(problem, self.group_size, self.max_new_tokens - len(prefix), prefix_ids=prefix)
            for problem, prefix in self.replay.states(state, count)
        ]

    @abstractmethod
    def credit(self, group: Group) -> Credit:
        """Advantages within one finished group; of the algorithm's `credit_type`."""

    def observe(self, memory: Any, groups: list[ObservedGroup], rng: np.random.Generator) -> Metrics:
        """Take a step's groups into the memory, in their order, before the update asks it."""
        return {}

    @abstractmethod
    def update(self, learner: Learner, groups: Iterable[dict]) -> Metrics:
        """The optimizer steps, in the paper's order."""
