"""The clipped policy update that GRPO and PPO share: its settings, their checks, and its optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms.contract import Learner
from algorithms.types import Loss, Metrics, Sequence, TokenBatch, mean_metrics

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("none", "k1", "k2", "k3")


@dataclass(frozen=True)
class PolicyUpdate:
    """Minibatch steps on the clipped surrogate with its regularisers."""

    problems_per_step: int
    group_size: int
    max_new_tokens: int
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

    def __post_init__(self) -> None:
        self.check_divides("minibatches", self.minibatches)
        if self.loss_aggregation not in AGGREGATIONS:
            raise ValueError(f"algorithm.loss_aggregation={self.loss_aggregation}: use one of {', '.join(AGGREGATIONS)}.")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"algorithm.kl_estimator={self.kl_estimator}: use one of {', '.join(KL_ESTIMATORS)}.")

    def check_divides(self, name: str, count: int) -> None:
        """ValueError unless a step's continuations can be cut into `count` equal minibatches."""
        if count < 1 or self.problems_per_step * self.group_size % count:
            raise ValueError(
                f"algorithm.{name}={count} does not divide the {self.problems_per_step} x {self.group_size} continuations of a "
                f"step: change problems_per_step, group_size or {name}."
            )

    @property
    def needs_reference(self) -> bool:
        return self.kl_estimator != "none"

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a step is ever taken with other weights than those that generated; else the old policy is the current one."""
        return self.minibatches * self.epochs > 1

    def improve(self, learner: Learner, batch: list[Sequence]) -> Metrics:
        """`epochs` x `minibatches` clipped steps."""
        return mean_metrics(
            [
                learner.step(part, self.loss_of(learner, part), self.loss_aggregation, with_entropy_grad=self.entropy_coef != 0)
                for _ in range(self.epochs)
                for part in learner.minibatches(batch, self.minibatches)
            ]
        )

    def loss_of(self, learner: Learner, minibatch: list[Sequence]) -> Loss:
        """The loss of one minibatch, for terms that count something over all of it."""
        return self.loss

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
