"""PPO with a value model, and by its fields HL-Gauss PPO, VAPO and EasyPPO (*Stabilizing the Critic Is Key*).

EasyPPO is three of them: `overlong_filter=actor_only` (section 3), `critic.noise_normalization` (equation 7) and
`critic.minibatches=4` (section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from algorithms.advantages import gae, length_adaptive_lambdas
from algorithms.interface import Learner
from algorithms.noise import inequality, noise_weights, return_std
from algorithms.policy_update import PolicyUpdate
from algorithms.types import (
    Bools,
    Credit,
    Group,
    Metrics,
    OptimizerSpec,
    Sample,
    StateBatch,
    Step,
    TokenBatch,
    TokenLoss,
    ValueModelSpec,
    mean_metrics,
)
from algorithms.value_config import ValueModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.value_heads import ValueHead

FILTERS = ("none", "both", "actor_only")
LR_MINIBATCHES = 4  # those at which a scaled learning rate of the value model is the one given (EasyPPO section 5)


@dataclass(frozen=True, kw_only=True)
class PPOCredit(Credit):
    """Who the value model learns from, and how noisy a prompt's returns are."""

    value_mask: Bools  # False keeps a continuation out of the value model's loss
    return_std: float | None = None  # spread of the group's returns; None where fewer than two are known


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyUpdate):
    """PPO on whole responses, credited token by token."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "gamma": (0, 1),
        "gae_lambda_policy": (0, 1),
        "gae_lambda_value": (0, 1),
        "length_adaptive_alpha": (1e-12, math.inf),
        "kl_in_reward": (0, math.inf),
        "positive_nll_coef": (0, math.inf),
        "reward_range": (-1e30, 1e30),
    }

    credit_type: ClassVar[type[Credit]] = PPOCredit

    gamma: float
    gae_lambda_policy: float
    gae_lambda_value: float
    length_adaptive_alpha: float | None
    whiten_advantages: bool
    kl_in_reward: float
    overlong_filter: str
    positive_nll_coef: float
    reward_range: tuple[float, float] | None
    critic: ValueModelConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_divides("critic.minibatches", self.critic.minibatches)
        if self.overlong_filter not in FILTERS:
            raise ValueError(f"algorithm.overlong_filter={self.overlong_filter}: use one of {', '.join(FILTERS)}.")
        self.critic.check(self.reward_range, self.group_size)

    @property
    def needs_reference(self) -> bool:
        return super().needs_reference or self.kl_in_reward != 0

    @property
    def head(self) -> ValueHead:
        return self.critic.head(self.reward_range)

    @property
    def value_model(self) -> ValueModelSpec:
        return ValueModelSpec(self.critic.path, self.head, self.critic.head_seed)

    @property
    def optimizers(self) -> dict[str, OptimizerSpec]:
        c = self.critic
        return {"value": OptimizerSpec("value", "timing_s/update_critic", c.betas, c.eps, c.weight_decay, c.clip_grad_norm)}

    def credit(self, group: Group) -> PPOCredit:
        """Who learns from which rollout, with masks of their own for actor and critic, and how noisy the prompt's returns are.

        The spread counts truncated rollouts too (section 4). One that the judge could not score teaches neither.
        """
        judged = ~np.isnan(group.rewards)
        completed = judged & ~group.truncated
        return PPOCredit(
            advantages=np.zeros(len(judged)),  # they follow by token, once the critic has seen the states
            actor_mask=judged if self.overlong_filter == "none" else completed,
            value_mask=completed if self.overlong_filter == "both" else judged,
            return_std=return_std(group.rewards),
        )

    def update(self, learner: Learner, groups: Iterable[dict]) -> Metrics:
        """Values and log-probabilities as groups arrive, advantages, K critic steps, and after the warm-up the actor's."""
        warming_up = learner.batches < self.critic.warmup_steps  # with so many batches before this one
        batch = learner.receive(groups, self.reads(warming_up))
        metrics = self.estimate(learner, batch, warming_up)
        metrics |= self.weigh(learner, batch)
        metrics |= self.improve_critic(learner, batch)
        if warming_up:
            return metrics | {"critic/warmup": 1.0}
        return metrics | self.improve(learner, batch)

    def reads(self, warming_up: bool) -> dict[str, Callable[[Sample], bool]]:
        """The models that an update reads, and on which samples; a penalty in the reward is part of what the value model learns."""
        reads: dict[str, Callable[[Sample], bool]] = {"value": learns_value}
        if self.kl_in_reward:
            policy = learns_value if self.entropy is None else lambda s: learns_value(s) or s.from_prompt
            return reads | {"policy": policy, "reference": learns_value}
        return reads | ({} if warming_up else self.forwards)

    # -- advantages and targets --------------------------------------------------------------------------------------------

    def estimate(self, learner: Learner, batch: list[Sample], warming_up: bool = False) -> Metrics:
        """Token advantages with the policy's lambda and value targets with the critic's, from all rollouts that the critic sees."""
        seen = [s for s in batch if learns_value(s)]
        rewards, values = [self.token_rewards(s) for s in seen], [_present(s.values) for s in seen]
        lengths = np.array([s.response_length for s in seen])
        fixed = self.gae_lambda_policy
        alpha = self.length_adaptive_alpha
        policy = np.full(len(seen), fixed) if alpha is None else length_adaptive_lambdas(lengths, alpha)
        lambda_value = self.gae_lambda_value
        if warming_up and self.critic.warmup_lambda is not None:
            lambda_value = self.critic.warmup_lambda
        advantages = gae(rewards, values, self.gamma, policy)
        same = bool((policy == lambda_value).all())
        targets = advantages if same else gae(rewards, values, self.gamma, np.full(len(seen), lambda_value))
        for s, advantage, target in zip(seen, advantages, targets, strict=True):
            s.advantage = advantage
            s.columns["returns"] = target + _present(s.values)
        metrics = value_metrics(learner, seen)
        if self.whiten_advantages:
            mean, variance, count = moments(learner, [np.asarray(s.advantage) for s in seen])
            for s in seen:
                s.advantage = (s.advantage - mean) / math.sqrt(variance * count / max(count - 1, 1) + 1e-8)
        return metrics

    def token_rewards(self, sample: Sample) -> np.ndarray:
        """The reward at the last token, less the KL penalty at each where there is one; [response]."""
        rewards = np.zeros(sample.response_length)
        if self.kl_in_reward:
            rewards -= self.kl_in_reward * (_present(sample.old_logprobs) - _present(sample.ref_logprobs))
        rewards[-1:] += sample.reward
        return rewards

    # -- the value model -----------------------------------------------------------------------------------------------------

    def weigh(self, learner: Learner, batch: list[Sample]) -> Metrics:
        """Equation 7's weight of each prompt, with mean one over the prompts of the batch, on whichever rank they are."""
        seen = [s for s in batch if learns_value(s)]
        for s in seen:
            s.columns["weight"] = 1.0
        if not self.critic.noise_normalization:
            return {}
        stds = dict(sorted(learner.gather(list({s.group: s.credit["return_std"] for s in seen}.items()))))
        if not stds:
            return {}
        floor = self.critic.floor(self.reward_range, self.group_size)
        weights = noise_weights(np.array([np.nan if std is None else std for std in stds.values()], float), floor)
        of_group = dict(zip(stds, weights.tolist(), strict=True))
        for s in seen:
            s.columns["weight"] = of_group[s.group]
        mean, largest, top = inequality(weights)
        return {
            "critic/noise_weight/mean": mean,
            "critic/noise_weight/max": largest,
            "critic/noise_weight/top_share": top,
            "critic/noise_weight/unknown": float(sum(std is None for std in stds.values())),
        }

    def improve_critic(self, learner: Learner, batch: list[Sample]) -> Metrics:
        """`epochs` x K clipped steps, each at the parameters that the one before left."""
        scale = math.sqrt(LR_MINIBATCHES / self.critic.minibatches) if self.critic.scale_lr else 1.0
        head = self.head

        def loss(states: StateBatch) -> tuple[Tensor, dict[str, Tensor]]:
            per_state, logged = head.loss(states.outputs, states.old_values, states.columns["returns"])
            weighted = states.columns["weight"] * per_state
            return weighted, logged | {"critic/vf_loss": weighted, "critic/vpred_mean": head.values(states.outputs)}

        metrics = []
        for _ in range(self.critic.epochs):
            for part in learner.minibatches(batch, self.critic.minibatches, self.balance_minibatches):
                warm = min(1.0, (learner.warmed("value") + 1) / max(self.critic.lr_warmup_steps, 1))
                samples = [s for s in part if learns_value(s)]
                metrics.append(critic_metrics(learner.step("value", samples, loss, lr=self.critic.lr * scale * warm)))
        return mean_metrics(metrics)

    # -- the actor ---------------------------------------------------------------------------------------------------------

    def loss_of(self, learner: Learner, minibatch: list[Sample]) -> TokenLoss:
        """The shared loss, and the mean negative log-likelihood of the positive responses' tokens where VAPO's option is on."""
        if not self.positive_nll_coef:
            return self.loss
        lengths = [sum(s.response_length for s in minibatch if s.reward > 0), sum(s.response_length for s in minibatch)]
        positive, tokens = learner.total([float(length) for length in lengths])
        scale = self.positive_nll_coef * tokens / max(positive, 1)  # the step divides by all tokens

        def loss(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
            per_token, logged = self.loss(batch)
            nll = -batch.logprobs * (batch.rewards > 0)
            return per_token + scale * nll, logged | {"actor/positive_nll": nll.detach()}

        return loss


def learns_value(sample: Sample) -> bool:
    """The samples that the value model learns from."""
    return bool(sample.credit["value_mask"])


def critic_metrics(step: Step) -> Metrics:
    """What a step of the value model logs."""
    if not step.tokens:
        return {"critic/empty_minibatches": 1.0}
    metrics = {"critic/grad_norm": step.grad_norm, "critic/lr": step.lr, "critic/nonfinite_steps": float(step.skipped)}
    return step.logged | metrics


def value_metrics(learner: Learner, seen: list[Sample]) -> Metrics:
    """How much of the targets the values explain: `1 - Var(R - V) / Var(R)` over the states of all ranks, and their means."""
    value, returns = [_present(s.values) for s in seen], [np.asarray(s.columns["returns"]) for s in seen]
    mean_return, variance, count = moments(learner, returns)
    if not count:
        return {}
    _, unexplained, _ = moments(learner, [r - v for r, v in zip(returns, value, strict=True)])
    mean_value, _, _ = moments(learner, value)
    metrics = {"critic/values/mean": mean_value, "critic/returns/mean": mean_return}
    return metrics | ({"critic/vf_explained_var": 1 - unexplained / variance} if variance else {})


def moments(learner: Learner, arrays: list[np.ndarray]) -> tuple[float, float, float]:
    """Mean, population variance and count of the numbers of all ranks."""
    count, total = learner.total([float(sum(len(a) for a in arrays)), float(sum(a.sum() for a in arrays))])
    mean = total / count if count else 0.0
    (squares,) = learner.total([float(sum(np.square(a - mean).sum() for a in arrays))])
    return mean, squares / count if count else 0.0, count


def _present(values: np.ndarray | None) -> np.ndarray:
    assert values is not None
    return values.astype(np.float64)
