"""AC2: action chunks from replayed prefixes, scored by the model itself where it has proved accurate (*Trust the Critic More*).

Algorithm 1 line by line: `plan` is lines 4 to 9, `credit` lines 10 and 11, `observe` lines 12 and 13, `update` line 14.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from algorithms.ac2_memory import AC2Memory, CriticConfig, critic_metrics
from algorithms.contract import Learner, PlanState
from algorithms.critic import CriticPrompt, critic_error, endpoint_advantages, group_target, round_to_grid
from algorithms.noise import noise_floor, return_std
from algorithms.readiness import PrefixError, ReadinessConfig, audited
from algorithms.replay import Replay
from algorithms.schedules import EntropyControl
from algorithms.types import Credit, CriticSettings, Group, Metrics, ObservedGroup, Problem, PromptRow, TokenBatch, mean_metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AC2:
    """AC2 and, by its fields, its variants (AC2 sections 4.2 and 4.3)."""

    name: ClassVar[str] = "ac2"
    max_rounds: ClassVar[int] = 1
    minibatches: ClassVar[int] = 2  # the critic's update goes between the two
    needs_reference: ClassVar[bool] = False
    trains_on_refills: ClassVar[bool] = True  # for the entropy of responses from the prompt
    critic_model: ClassVar[None] = None

    problems_per_step: int  # n_batch: replayed prefixes
    group_size: int  # g
    max_new_tokens: int  # response budget, prefix included
    chunk_tokens: int  # b
    replay: Replay
    readiness: ReadinessConfig
    audit_fraction: float  # alpha
    grouped: bool  # False: single chunks from `group_size` prefixes of a ready problem, with V(s) as their baseline
    reference_reward: float  # a rollout of at least this reward may become its problem's reference
    min_valid: int  # valid values of a group that make a critic target
    critic: CriticConfig
    entropy: EntropyControl
    clip_low: float
    clip_high: float  # base, to which the entropy control's offset is added
    dual_clip: float | None
    importance_cap: float | None  # token TIS between engine and trainer log-probabilities; null turns it off

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"algorithm.group_size={self.group_size}: a group baseline needs at least 2 continuations.")
        if not 0 < self.chunk_tokens < self.max_new_tokens:
            raise ValueError(
                f"algorithm.chunk_tokens={self.chunk_tokens}: not below the response budget of {self.max_new_tokens} tokens, so "
                "the critic would never score one; lower it, or use algorithm=prefix_grpo."
            )
        if self.replay.cut_grid > self.replay.max_cut_fraction * self.max_new_tokens:
            raise ValueError(
                f"algorithm.replay.cut_grid={self.replay.cut_grid}: not even a response of {self.max_new_tokens} tokens would "
                "ever be cut, so every prefix would be empty; lower it."
            )
        if not 1 <= self.min_valid <= self.group_size:
            raise ValueError(f"algorithm.min_valid={self.min_valid}: must lie within 1 and group_size={self.group_size}.")
        if not 0 <= self.audit_fraction <= 1:
            raise ValueError(f"algorithm.audit_fraction={self.audit_fraction}: must lie within 0 and 1.")
        if not self.grouped and self.audit_fraction:
            raise ValueError("algorithm.grouped=false leaves no groups to audit; set algorithm.audit_fraction=0 too.")

    @property
    def critic_optimizer(self) -> CriticSettings:
        return CriticSettings(self.critic.clip_grad_norm, self.critic.betas, self.critic.eps)

    def new_memory(self, prompt: CriticPrompt | None, context_limit: int) -> AC2Memory:
        """Empty; `prompt` asks the model for values, in contexts of up to `context_limit` tokens."""
        assert prompt is not None
        floor = noise_floor((0.0, 1.0), self.group_size)  # values lie within 0 and 1
        return AC2Memory(self.critic, self.readiness, self.entropy, prompt, context_limit, floor)

    # -- lines 4 to 9: what to roll out ----------------------------------------------------------------------------------

    def plan(self, state: PlanState) -> list[PromptRow]:
        """Refills, and a group from each cut state: to its end where the critic is not trusted or is audited, else one chunk."""
        memory: AC2Memory = state.memory
        rows = self.replay.refill(state, self.max_new_tokens)
        states = self.replay.states(state, self.problems_per_step)
        ready = [i for i, (problem, _) in enumerate(states) if memory.readiness.is_ready(problem.problem_id)]
        audits = audited(ready, self.audit_fraction, state.rng)
        for i, (problem, prefix) in enumerate(states):
            if i in audits:
                rows.append(self._row(memory, problem, prefix, self.group_size, False, "audit"))
            elif i not in ready:
                rows.append(self._row(memory, problem, prefix, self.group_size, False))
            elif self.grouped:
                rows.append(self._row(memory, problem, prefix, self.group_size, True))
            else:
                prefixes = self.replay.prefixes(state, problem.problem_id, self.group_size)
                rows += [self._row(memory, problem, cut, 1, True) for cut in prefixes]
        return rows

    def _row(
        self, memory: AC2Memory, problem: Problem, prefix: list[int], n: int, chunk: bool, purpose: str = "train"
    ) -> PromptRow:
        left = self.max_new_tokens - len(prefix)
        reference = memory.reference(problem.problem_id)
        return PromptRow(
            problem,
            n,
            min(self.chunk_tokens, left) if chunk else left,
            purpose,
            prefix,
            chunk=chunk,
            ask_critic=True,
            reference_ids=reference.tolist() if reference is not None else None,
        )

    # -- lines 10 and 11: endpoint values, advantages, and the critic's target -------------------------------------------

    def credit(self, group: Group) -> Credit:
        """`A_i = v_i - mean_j v_j`, or `v - V(s)` where a state has a single chunk; the target is the mean value on the grid."""
        values = np.where(group.from_critic, group.values, group.rewards)
        if len(values) > 1:
            advantages, mask = endpoint_advantages(values, group.from_critic)
            return Credit(advantages, mask, critic_target=group_target(values, self.min_valid), return_std=return_std(values))
        invalid = np.isnan(values)
        if group.prefix_value is None or (group.from_critic & invalid).any():
            return Credit(np.zeros(1), np.zeros(1, bool))  # without a baseline or a value it is left out of both losses
        advantages = np.where(invalid, 0.0, values) - group.prefix_value
        return Credit(advantages, np.ones(1, bool), critic_target=None if invalid[0] else round_to_grid(values[0]))

    # -- lines 12 and 13: the critic's error, who becomes ready; pairs and references -------------------------------------

    def observe(self, memory: AC2Memory, groups: list[ObservedGroup], rng: np.random.Generator) -> Metrics:
        """Take a step's groups, in their order. Readiness sees the bank as it was before this step's additions."""
        sampled = [group for group in groups if group.purpose != "refill"]
        were_ready = [memory.readiness.is_ready(group.problem_id) for group in sampled]
        errors, audits = [], []
        for group in sampled:
            if group.critic_target is None:
                continue
            error = critic_error(group.prefix_value, group.critic_target)
            errors.append(PrefixError(group.problem_id, group.prefix_value, error))
            memory.add_pair(group, group.critic_target)
            if group.purpose == "audit":
                audits.append(error)
        new = memory.readiness.complete_step(errors, memory.bank)
        memory.add_references(groups, self.reference_reward, rng)
        critic = critic_metrics(memory, errors, sampled)
        memory.note_answers([group.prefix_value for group in sampled], critic.get("ac2/rank_correlation"))
        metrics = {"ac2/newly_ready": float(len(new)), "ac2/ready_fraction": float(np.mean(were_ready)) if were_ready else 0.0}
        if audits:
            metrics["ac2/audit_mae"] = float(np.mean(audits))
        return metrics | critic

    # -- line 14: actor, critic, actor -------------------------------------------------------------------------------------

    def update(self, learner: Learner, groups: Iterable[dict]) -> Metrics:
        """First actor minibatch, the critic, second actor minibatch: one after another on shared weights, with two optimizers."""
        batch = learner.receive(
            groups, with_old_logprobs=True, with_ref_logprobs=False, logprobs_of=lambda s: s.actor_mask or s.from_prompt
        )
        recalled = learner.recall()
        entropy = learner.prompt_entropy(batch)
        offset = self.entropy.next_offset(recalled.values["clip_offset"], entropy)
        clip_high = self.clip_high + offset
        first, second = learner.minibatches(batch, self.minibatches)

        def loss(tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
            from algorithms.losses import policy_gradient_loss

            return policy_gradient_loss(tokens, self.clip_low, clip_high, self.dual_clip, self.importance_cap)

        actor = [learner.step(first, loss, "token-mean", with_entropy_grad=False, measure_change=True)]
        critic = learner.critic_step(recalled.examples, recalled.weight, recalled.values["critic_lr"])
        actor.append(learner.step(second, loss, "token-mean", with_entropy_grad=False, measure_change=True))

        lr, streak = self.critic.rate.after_step(
            recalled.values["critic_lr"],
            int(recalled.values["streak"]),
            critic["critic/update_norm"],
            sum(one["actor/update_norm"] for one in actor),
        )
        learner.remember({"clip_offset": offset, "critic_lr": lr, "streak": float(streak)})
        schedule = {"actor/clip_high": clip_high} | ({"actor/prompt_entropy": entropy} if entropy is not None else {})
        return mean_metrics(actor) | critic | recalled.metrics | schedule
