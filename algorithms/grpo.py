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
from algorithms.replay import Replay
from algorithms.types import Credit, Group, Metrics, ObservedGroup, PromptRow, TokenBatch, mean_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.critic import CriticPrompt

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("none", "k1", "k2", "k3")


@dataclass(frozen=True)
class GRPO:
    """GRPO and, by its fields, DAPO (dynamic sampling, clip-higher, overlong filtering) and Dr. GRPO."""

    name: ClassVar[str] = "grpo"

    problems_per_step: int
    group_size: int
    max_new_tokens: int
    normalize_std: bool  # divide advantages by the group's standard deviation
    minibatches: int  # optimizer steps per epoch over the step's batch
    epochs: int
    loss_aggregation: str  # token-mean | seq-mean-token-mean | seq-mean-token-sum-norm
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_estimator: str  # none | k1 | k2 | k3, against the initial model
    kl_coef: float
    entropy_coef: float
    importance_cap: float | None  # token TIS between engine and trainer log-probabilities; null turns it off
    dynamic_sampling: bool  # replace groups whose rewards are all equal
    max_rounds: int  # rounds of replacement, the first included
    overlong_filter: bool  # truncated responses get no loss
    replay: Replay | None = None  # start from prefixes of past rollouts; null starts from the prompts

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"algorithm.group_size={self.group_size}: a group baseline needs at least 2 continuations.")
        if self.problems_per_step * self.group_size % self.minibatches:
            raise ValueError(
                f"algorithm.minibatches={self.minibatches} does not divide the {self.problems_per_step} x {self.group_size} "
                "continuations of a step: change problems_per_step, group_size or minibatches."
            )
        if self.loss_aggregation not in AGGREGATIONS:
            raise ValueError(f"algorithm.loss_aggregation={self.loss_aggregation}: use one of {', '.join(AGGREGATIONS)}.")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"algorithm.kl_estimator={self.kl_estimator}: use one of {', '.join(KL_ESTIMATORS)}.")
        if self.max_rounds > 1 and not self.dynamic_sampling:
            raise ValueError("algorithm.max_rounds above 1 has no effect without algorithm.dynamic_sampling=true.")

    trains_on_refills: ClassVar[bool] = False
    critic_optimizer: ClassVar[None] = None

    @property
    def needs_reference(self) -> bool:
        return self.kl_estimator != "none"

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
        batch = learner.receive(groups, with_old_logprobs=True, with_ref_logprobs=self.needs_reference)
        return mean_metrics(
            [
                learner.step(minibatch, self.loss, self.loss_aggregation, with_entropy_grad=self.entropy_coef != 0)
                for _ in range(self.epochs)
                for minibatch in learner.minibatches(batch, self.minibatches)
            ]
        )

    def loss(self, tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate x TIS weight, plus KL penalty, minus entropy bonus; per token."""
        from algorithms.losses import kl_penalty, policy_gradient_loss

        loss, logged = policy_gradient_loss(tokens, self.clip_low, self.clip_high, self.dual_clip, self.importance_cap)
        if self.kl_estimator != "none":
            kl = kl_penalty(tokens.logprobs, tokens.ref_logprobs, self.kl_estimator)
            loss = loss + self.kl_coef * kl
            logged["actor/kl_loss"] = kl.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * tokens.entropy
        return loss, logged
