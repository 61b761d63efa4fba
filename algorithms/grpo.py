"""GRPO: every continuation of a group is credited with its reward minus the group's mean (Shao et al., 2024; AC2 section 2).

Prefix GRPO (AC2 section 4.1) is GRPO whose states are replayed prefixes: the field `replay`. DAPO, Dr. GRPO, GSPO and CISPO are
fields too.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from algorithms.advantages import check_judge_failure, group_advantages
from algorithms.interface import Learner, PlanState
from algorithms.policy_update import PolicyUpdate
from algorithms.types import Credit, Group, Metrics, PromptRow


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyUpdate):
    """A group's mean reward is the baseline of its continuations."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "max_rounds": (1, math.inf),
    }

    normalize_std: bool
    dynamic_sampling: bool
    max_rounds: int
    overlong_filter: bool
    judge_failure: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_judge_failure(self.judge_failure)
        if self.group_size < 2:
            raise ValueError(f"algorithm.group_size={self.group_size}: a group baseline needs at least 2 continuations.")
        if self.max_rounds > 1 and not self.dynamic_sampling:
            raise ValueError("algorithm.max_rounds above 1 has no effect without algorithm.dynamic_sampling=true.")

    def plan(self, state: PlanState) -> list[PromptRow]:
        """As many groups as the step still lacks, in up to `max_rounds` rounds."""
        missing = self.problems_per_step - state.kept_groups
        return self.plan_groups(state, missing) if state.round < self.max_rounds else []

    def credit(self, group: Group) -> Credit:
        """`A_i = r_i - mean_j r_j`; a group without spread teaches nothing."""
        rewards = np.nan_to_num(group.rewards, nan=0.0) if self.judge_failure == "zero" else group.rewards
        valid = ~np.isnan(rewards)
        mask = valid & ~(group.truncated & self.overlong_filter)
        spread = bool(valid.any()) and float(np.ptp(rewards[valid])) > 0
        return Credit(group_advantages(rewards, self.normalize_std), mask, keep=spread or not self.dynamic_sampling)

    def update(self, learner: Learner, groups: Iterable[dict]) -> Metrics:
        """Old log-probabilities as groups arrive, then `epochs` x `minibatches` clipped steps."""
        return self.improve(learner, learner.receive(groups, self.forwards))
