"""The policy update that GRPO and PPO share: its settings, their checks, and its optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from algorithms.base import Algorithm
from algorithms.entropy import EntropyControl, EntropyMemory, prompt_entropy, schedule_metrics
from algorithms.interface import Learner, Memory
from algorithms.types import Metrics, Sample, Step, TokenBatch, TokenLoss, mean_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.self_critic import SelfCriticPrompt

# What each setting may be.
CHOICES = {
    "loss_aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "kl_estimator": ("none", "k1", "k2", "k3", "low_var_kl"),
    "surrogate": ("clip", "cispo"),
    "importance_ratio": ("token", "sequence"),
}


def has_actor_loss(sample: Sample) -> bool:
    """The samples whose log-probabilities the actor's loss needs."""
    return sample.actor_mask


def actor_metrics(step: Step) -> Metrics:
    """What a step of the actor logs."""
    if not step.tokens:
        return {"actor/empty_minibatches": 1.0}
    metrics = {"actor/grad_norm": step.grad_norm, "actor/lr": step.lr, "actor/nonfinite_steps": float(step.skipped)}
    return step.logged | metrics


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(Algorithm):
    """Minibatch steps on the clipped surrogate with its regularisers."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "minibatches": (1, math.inf),
        "epochs": (1, math.inf),
        "clip_low": (0, 1),
        "clip_high": (0, math.inf),
        "dual_clip": (1, math.inf),
        "kl_coef": (0, math.inf),
        "entropy_coef": (-math.inf, math.inf),
        "importance_cap": (1e-9, math.inf),
    }

    minibatches: int
    epochs: int
    loss_aggregation: str
    surrogate: str
    importance_ratio: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_estimator: str
    kl_coef: float
    entropy_coef: float
    importance_cap: float | None
    balance_minibatches: bool
    entropy: EntropyControl | None

    def __post_init__(self) -> None:
        if self.replay is not None:
            self.replay.check_budget(self.max_new_tokens)
        self.check_divides("minibatches", self.minibatches)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"algorithm.{name}={getattr(self, name)}: use one of {', '.join(choices)}.")
        if self.dual_clip is not None and self.surrogate != "clip":
            raise ValueError(f"algorithm.dual_clip has no effect on surrogate={self.surrogate}: set it to null.")

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
    def trains_on_refills(self) -> bool:
        return self.entropy is not None  # they are responses from the prompt

    def new_memory(self, prompt: SelfCriticPrompt | None, context_limit: int) -> Memory | None:
        return None if self.entropy is None else EntropyMemory(self.entropy.initial)

    @property
    def forwards(self) -> dict[str, Callable[[Sample], bool]]:
        """The models whose log-probabilities the loss reads, on the samples that have one.

        Where each batch is used for one step the old policy is the current one, and its forward is saved.
        """
        reads: dict[str, Callable[[Sample], bool]] = {"reference": has_actor_loss} if self.needs_reference else {}
        if self.entropy is not None:
            return {"policy": lambda sample: sample.actor_mask or sample.from_prompt} | reads
        return ({"policy": has_actor_loss} if self.minibatches * self.epochs > 1 else {}) | reads

    def improve(self, learner: Learner, batch: list[Sample]) -> Metrics:
        """`epochs` x `minibatches` clipped steps, their upper clip set anew where the entropy is controlled."""
        if self.entropy is None:
            return self.take_steps(learner, batch)
        entropy = prompt_entropy(learner, batch)
        offset = self.entropy.next_offset(learner.recall().values["clip_offset"], entropy)
        learner.remember({"clip_offset": offset})
        adapted = replace(self, clip_high=self.clip_high + offset)
        return adapted.take_steps(learner, batch) | schedule_metrics(adapted.clip_high, entropy)

    def take_steps(self, learner: Learner, batch: list[Sample]) -> Metrics:
        """`epochs` x `minibatches` clipped steps."""
        metrics = []
        for _ in range(self.epochs):
            for part in learner.minibatches(batch, self.minibatches, self.balance_minibatches):
                trained = [sample for sample in part if sample.actor_mask]
                loss = self.loss_of(learner, trained)
                step = learner.step("actor", trained, loss, aggregation=self.loss_aggregation, entropy_grad=self.entropy_coef != 0)
                metrics.append(actor_metrics(step))
        return mean_metrics(metrics)

    def loss_of(self, learner: Learner, minibatch: list[Sample]) -> TokenLoss:
        """The loss of one minibatch, for terms that count something over all of it."""
        return self.loss

    def loss(self, tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Surrogate x TIS weight, plus KL penalty, minus entropy bonus; per token."""
        from algorithms.losses import kl_penalty, policy_gradient_loss

        loss, logged = policy_gradient_loss(
            tokens,
            self.clip_low,
            self.clip_high,
            self.dual_clip,
            self.importance_cap,
            cispo=self.surrogate == "cispo",
            by_sequence=self.importance_ratio == "sequence",
        )
        if self.kl_estimator != "none":
            kl = kl_penalty(tokens.logprobs, tokens.ref_logprobs, self.kl_estimator)
            loss = loss + self.kl_coef * kl
            logged["actor/kl_loss"] = kl.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * tokens.entropy
        return loss, logged
