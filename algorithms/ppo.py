"""PPO with a critic model of its own, and by its fields HL-Gauss PPO, VAPO and EasyPPO (*Stabilizing the Critic Is Key*).

EasyPPO is three of them: `overlong_filter=actor_only` (section 3), `critic.noise_normalization` (equation 7) and
`critic.minibatches=4` (section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from algorithms.advantages import gae, length_adaptive_lambdas
from algorithms.contract import Learner, PlanState
from algorithms.noise import noise_floor, noise_weights, return_std, weight_metrics
from algorithms.policy_update import PolicyUpdate
from algorithms.types import (
    Credit,
    CriticModelSettings,
    Group,
    Loss,
    Metrics,
    ObservedGroup,
    PromptRow,
    Sequence,
    TokenBatch,
    mean_metrics,
)

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.critic import CriticPrompt
    from algorithms.value_heads import ValueBatch, ValueHead

FILTERS = ("none", "both", "actor_only")
LR_MINIBATCHES = 4  # those at which a scaled critic learning rate is the one given (EasyPPO section 5)


@dataclass(frozen=True)
class CategoricalConfig:
    """The bins of an HL-Gauss critic."""

    bins: int
    support: tuple[float, float]
    bandwidth: float


@dataclass(frozen=True)
class CriticModelConfig:
    """The critic model and its update."""

    path: str | None  # a model folder, or the `critic` folder of a checkpoint; null begins where the policy does
    lr: float
    scale_lr: bool  # times sqrt(4 / minibatches)
    lr_warmup_steps: int  # optimizer steps
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad_norm: float
    minibatches: int  # K: optimizer steps per epoch over the step's batch
    epochs: int
    value_clip: float | None
    warmup_steps: int  # rollout batches from which only the critic learns
    warmup_lambda: float | None  # lambda of its targets meanwhile; 1 is value pretraining on returns; null is gae_lambda_value
    noise_normalization: bool
    noise_floor: float | None  # null: the range of rewards / (2 sqrt(group_size))
    categorical: CategoricalConfig | None = None  # null: a scalar head


@dataclass(frozen=True)
class PPO(PolicyUpdate):
    """PPO on whole responses, credited token by token."""

    name: ClassVar[str] = "ppo"
    max_rounds: ClassVar[int] = 1
    replay: ClassVar[None] = None
    trains_on_refills: ClassVar[bool] = False
    critic_optimizer: ClassVar[None] = None

    gamma: float
    gae_lambda_policy: float
    gae_lambda_value: float
    length_adaptive_alpha: float | None  # lambda of the policy 1 - 1 / (alpha l) instead (VAPO); null keeps it fixed
    whiten_advantages: bool  # to mean 0 and deviation 1 over the tokens of the step
    kl_in_reward: float  # coefficient of the k1 estimate against the initial model at each token; 0 keeps rewards as they are
    overlong_filter: str  # none | both | actor_only
    positive_nll_coef: float  # of the language-modelling loss on responses with a positive reward (VAPO)
    reward_range: tuple[float, float] | None  # of the task
    critic: CriticModelConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        critic = self.critic
        self.check_divides("critic.minibatches", critic.minibatches)
        if self.overlong_filter not in FILTERS:
            raise ValueError(f"algorithm.overlong_filter={self.overlong_filter}: use one of {', '.join(FILTERS)}.")
        if self.length_adaptive_alpha is not None and self.length_adaptive_alpha <= 0:
            raise ValueError(f"algorithm.length_adaptive_alpha={self.length_adaptive_alpha}: must be above 0, or null.")
        for name in ("gamma", "gae_lambda_policy", "gae_lambda_value"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"algorithm.{name}={getattr(self, name)}: must lie within 0 and 1.")
        if critic.noise_normalization:
            self._check_noise()
        if critic.categorical is not None:
            self._check_bins(critic.categorical)

    def _check_noise(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                "algorithm.critic.noise_normalization needs the spread of a prompt's returns: set algorithm.group_size to 2 or "
                "more."
            )
        if self.critic.noise_floor is None and self.reward_range is None:
            raise ValueError(
                "algorithm.critic.noise_normalization has no floor: give algorithm.critic.noise_floor, or "
                "task.reward_range=[low,high] to derive it from."
            )
        if self.critic.noise_floor is not None and self.critic.noise_floor <= 0:
            raise ValueError(f"algorithm.critic.noise_floor={self.critic.noise_floor}: must be above 0, or null.")

    def _check_bins(self, categorical: CategoricalConfig) -> None:
        low, high = categorical.support
        if self.reward_range is not None and (self.reward_range[0] < low or self.reward_range[1] > high):
            raise ValueError(
                f"algorithm.critic.categorical.support={[low, high]} does not cover task.reward_range="
                f"{list(self.reward_range)}: widen it."
            )

    @property
    def needs_reference(self) -> bool:
        return super().needs_reference or self.kl_in_reward != 0

    @property
    def head(self) -> ValueHead:
        from algorithms.value_heads import HLGauss, ScalarHead

        bins = self.critic.categorical
        return ScalarHead(self.critic.value_clip) if bins is None else HLGauss(bins.bins, bins.support, bins.bandwidth)

    @property
    def critic_model(self) -> CriticModelSettings:
        c = self.critic
        return CriticModelSettings(c.path, self.head, c.betas, c.eps, c.weight_decay, c.clip_grad_norm, c.lr_warmup_steps)

    def new_memory(self, prompt: CriticPrompt | None, context_limit: int) -> None:
        """All that it remembers is in the critic's weights."""

    def observe(self, memory: None, groups: list[ObservedGroup], rng: np.random.Generator) -> Metrics:
        return {}

    def plan(self, state: PlanState) -> list[PromptRow]:
        """Fresh problems, once a step."""
        return [PromptRow(p, self.group_size, self.max_new_tokens) for p in state.fresh_problems(self.problems_per_step)]

    def credit(self, group: Group) -> Credit:
        """Who learns from which rollout, with masks of their own for actor and critic, and how noisy the prompt's returns are.

        The spread counts truncated rollouts too (section 4). One that the judge could not score teaches neither.
        """
        judged = ~np.isnan(group.rewards)
        completed = judged & ~group.truncated
        return Credit(
            advantages=np.zeros(len(judged)),  # by token, once the critic has seen the states
            actor_mask=judged if self.overlong_filter == "none" else completed,
            critic_mask=completed if self.overlong_filter == "both" else judged,
            return_std=return_std(group.rewards),
        )

    def update(self, learner: Learner, groups: Iterable[dict]) -> Metrics:
        """Values and log-probabilities as groups arrive, advantages, K critic steps, and after the warm-up the actor's."""
        warming_up = learner.batches < self.critic.warmup_steps  # with so many batches before this one
        batch = learner.receive(
            groups,
            with_old_logprobs=self.needs_old_logprobs or self.kl_in_reward != 0,
            with_ref_logprobs=self.needs_reference,
            with_values=True,
            logprobs_of=lambda s: s.critic_mask if self.kl_in_reward else s.actor_mask and not warming_up,
        )
        metrics = self.estimate(learner, batch, warming_up)
        metrics |= self.weigh(learner, batch)
        metrics |= self.improve_critic(learner, batch)
        if warming_up:
            return metrics | {"critic/warmup": 1.0}
        return metrics | self.improve(learner, batch)

    # -- advantages and targets --------------------------------------------------------------------------------------------

    def estimate(self, learner: Learner, batch: list[Sequence], warming_up: bool = False) -> Metrics:
        """Token advantages with the policy's lambda and value targets with the critic's, from all rollouts that the critic sees."""
        seen = [s for s in batch if s.critic_mask]
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
            s.advantage, s.returns = advantage, target + _present(s.values)
        metrics = value_metrics(learner, seen)
        if self.whiten_advantages:
            mean, variance, count = moments(learner, [np.asarray(s.advantage) for s in seen])
            for s in seen:
                s.advantage = (s.advantage - mean) / math.sqrt(variance * count / max(count - 1, 1) + 1e-8)
        return metrics

    def token_rewards(self, sequence: Sequence) -> np.ndarray:
        """The reward at the last token, less the KL penalty at each where there is one; [response]."""
        rewards = np.zeros(sequence.response_length)
        if self.kl_in_reward:
            rewards -= self.kl_in_reward * (_present(sequence.old_logprobs) - _present(sequence.ref_logprobs))
        rewards[-1:] += sequence.reward
        return rewards

    # -- the critic --------------------------------------------------------------------------------------------------------

    def weigh(self, learner: Learner, batch: list[Sequence]) -> Metrics:
        """Equation 7's weight of each prompt, with mean one over the prompts of the batch, on whichever rank they are."""
        if not self.critic.noise_normalization:
            return {}
        own = {s.group: s.return_std for s in batch if s.critic_mask}
        stds = dict(sorted(learner.gather(list(own.items()))))
        weights = noise_weights(np.array([np.nan if std is None else std for std in stds.values()], float), self.floor)
        of_group = dict(zip(stds, weights.tolist(), strict=True))
        for s in batch:
            s.critic_weight = of_group.get(s.group, 1.0)
        unknown = {"critic/noise_weight/unknown": float(sum(std is None for std in stds.values()))}
        return weight_metrics(weights) | unknown

    @property
    def floor(self) -> float:
        """The least return deviation that counts."""
        if self.critic.noise_floor is not None:
            return self.critic.noise_floor
        assert self.reward_range is not None
        return noise_floor(self.reward_range, self.group_size)

    def improve_critic(self, learner: Learner, batch: list[Sequence]) -> Metrics:
        """`epochs` x K clipped steps, each at the parameters that the one before left."""
        scale = math.sqrt(LR_MINIBATCHES / self.critic.minibatches) if self.critic.scale_lr else 1.0
        head = self.head

        def loss(states: ValueBatch) -> tuple[Tensor, dict[str, Tensor]]:
            per_state, logged = head.loss(states)
            return states.weights * per_state, logged

        return mean_metrics(
            [
                learner.value_step(part, loss, self.critic.lr * scale)
                for _ in range(self.critic.epochs)
                for part in learner.minibatches(batch, self.critic.minibatches)
            ]
        )

    # -- the actor ---------------------------------------------------------------------------------------------------------

    def loss_of(self, learner: Learner, minibatch: list[Sequence]) -> Loss:
        """The shared loss, and the mean negative log-likelihood of the positive responses' tokens where VAPO's option is on."""
        if not self.positive_nll_coef:
            return self.loss
        trained = [s for s in minibatch if s.actor_mask]
        lengths = [sum(s.response_length for s in trained if s.reward > 0), sum(s.response_length for s in trained)]
        positive, tokens = learner.total([float(length) for length in lengths])
        scale = self.positive_nll_coef * tokens / max(positive, 1)  # the step divides by all tokens

        def loss(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
            per_token, logged = self.loss(batch)
            nll = -batch.logprobs * (batch.rewards > 0)
            return per_token + scale * nll, logged | {"actor/positive_nll": nll.detach()}

        return loss


def value_metrics(learner: Learner, seen: list[Sequence]) -> Metrics:
    """How much of the targets the values explain: `1 - Var(R - V) / Var(R)` over the states of all ranks, and their means."""
    value, returns = [_present(s.values) for s in seen], [_present(s.returns) for s in seen]
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
