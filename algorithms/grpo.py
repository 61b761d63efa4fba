"""GRPO: every continuation of a group is credited with its reward minus the group's mean (Shao et al., 2024; AC2 section 2).

Prefix GRPO (AC2 section 4.1) is GRPO whose states are replayed prefixes: the field `replay`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from algorithms.advantages import group_advantages
from algorithms.contract import Learner, PlanState
from algorithms.policy_update import PolicyUpdate
from algorithms.replay import Replay
from algorithms.types import Credit, Group, Metrics, ObservedGroup, PromptRow

if TYPE_CHECKING:
    from algorithms.critic import CriticPrompt


@dataclass(frozen=True)
class GRPO(PolicyUpdate):
    """GRPO and, by its fields, DAPO (dynamic sampling, clip-higher, overlong filtering) and Dr. GRPO."""

    name: ClassVar[str] = "grpo"
    trains_on_refills: ClassVar[bool] = False
    critic_optimizer: ClassVar[None] = None
    critic_model: ClassVar[None] = None

    normalize_std: bool  # divide advantages by the group's standard deviation
    dynamic_sampling: bool  # replace groups whose rewards are all equal
    max_rounds: int  # rounds of replacement, the first included
    overlong_filter: bool  # truncated responses get no loss
    replay: Replay | None = None  # start from prefixes of past rollouts; null starts from the prompts

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise ValueError(f"algorithm.group_size={self.group_size}: a group baseline needs at least 2 continuations.")
        if self.max_rounds > 1 and not self.dynamic_sampling:
            raise ValueError("algorithm.max_rounds above 1 has no effect without algorithm.dynamic_sampling=true.")

    def new_memory(self, prompt: CriticPrompt | None, context_limit: int) -> None:
        """It remembers nothing."""

    def observe(self, memory: None, groups: list[ObservedGroup], rng: np.random.Generator) -> Metrics:
        return {}

    def plan(self, state: PlanState) -> list[PromptRow]:
        """Fresh problems or replayed prefixes, as many as the step still lacks; the response budget counts the prefix."""
        missing = self.problems_per_step - state.kept_groups
        if self.replay is None:
            return [PromptRow(problem, self.group_size, self.max_new_tokens) for problem in state.fresh_problems(missing)]
        refill = self.replay.refill(state, self.max_new_tokens) if state.round == 0 else []
        return refill + [
            PromptRow(problem, self.group_size, self.max_new_tokens - len(prefix), prefix_ids=prefix)
            for problem, prefix in self.replay.states(state, missing)
        ]

    def credit(self, group: Group) -> Credit:
        """`A_i = r_i - mean_j r_j`; a group without spread teaches nothing."""
        valid = ~np.isnan(group.rewards)
        mask = valid & ~(group.truncated & self.overlong_filter)
        spread = bool(valid.any()) and float(np.ptp(group.rewards[valid])) > 0
        return Credit(group_advantages(group.rewards, self.normalize_std), mask, keep=spread or not self.dynamic_sampling)

    def update(self, learner: Learner, groups: Iterable[dict]) -> Metrics:
        """Old log-probabilities as groups arrive, then `epochs` x `minibatches` clipped steps."""
        batch = learner.receive(groups, with_old_logprobs=self.needs_old_logprobs, with_ref_logprobs=self.needs_reference)
        return self.improve(learner, batch)
