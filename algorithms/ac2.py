"""AC2: action chunks from replayed prefixes, scored by the model itself where it has proved accurate (*Trust the Critic More*).

Algorithm 1 line by line: `plan` is lines 4 to 9, `credit` lines 10 and 11, `observe` lines 12 and 13, `update` line 14.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from algorithms.ac2_memory import AC2Memory, SelfCriticConfig, observed_metrics
from algorithms.advantages import check_judge_failure
from algorithms.base import Algorithm
from algorithms.entropy import EntropyControl, prompt_entropy, schedule_metrics
from algorithms.interface import Learner, PlanState
from algorithms.noise import noise_floor, return_std
from algorithms.policy_update import actor_metrics
from algorithms.readiness import PrefixError, ReadinessConfig, audited
from algorithms.self_critic import (
    MAX_ANSWER_TOKENS,
    SelfCriticPrompt,
    endpoint_advantages,
    group_target,
    round_to_grid,
    value_error,
)
from algorithms.types import (
    Credit,
    Group,
    Lesson,
    Metrics,
    ObservedGroup,
    OptimizerSpec,
    Problem,
    PromptRow,
    Recalled,
    Sample,
    Step,
    TokenBatch,
    mean_metrics,
)

if TYPE_CHECKING:
    from torch import Tensor


# What each setting may be.
CHOICES = {
    "invalid_value": ("mean_of_valid", "mean_with_failures"),
    "weightless_tokens": ("left_out", "counted"),
}


@dataclass(frozen=True)
class AC2Credit(Credit):
    """What AC2's memory needs to know of a group."""

    self_critic_target: float | None = None  # what the self-critic shall say of the state
    return_std: float | None = None  # spread of the group's endpoint values


@dataclass(frozen=True, kw_only=True)
class AC2(Algorithm):
    """AC2 and, by its fields, its variants (AC2 sections 4.2 and 4.3)."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "chunk_tokens": (1, math.inf),
        "audit_fraction": (0, 1),
        "reference_reward": (-math.inf, math.inf),
        "min_valid": (1, math.inf),
        "clip_low": (0, 1),
        "clip_high": (0, math.inf),
        "dual_clip": (1, math.inf),
        "importance_cap": (1e-9, math.inf),
    }

    credit_type: ClassVar[type[Credit]] = AC2Credit
    self_critic_asked: ClassVar[bool] = True
    minibatches: ClassVar[int] = 2  # the self-critic's update goes between the two

    chunk_tokens: int  # b
    readiness: ReadinessConfig
    audit_fraction: float  # alpha
    grouped: bool
    reference_reward: float
    given_references: bool
    min_valid: int
    self_critic: SelfCriticConfig
    entropy: EntropyControl
    clip_low: float
    clip_high: float
    dual_clip: float | None
    importance_cap: float | None
    judge_failure: str
    invalid_value: str
    weightless_tokens: str
    balance_minibatches: bool

    def __post_init__(self) -> None:
        check_judge_failure(self.judge_failure)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"algorithm.{name}={getattr(self, name)}: use {' or '.join(choices)}.")
        if self.replay is None:
            raise ValueError("algorithm.replay=null: AC2 cuts its prefixes from a replay buffer; give its sizes.")
        if self.group_size < 2:
            raise ValueError(f"algorithm.group_size={self.group_size}: a group baseline needs at least 2 continuations.")
        if not 0 < self.chunk_tokens < self.max_new_tokens:
            raise ValueError(
                f"algorithm.chunk_tokens={self.chunk_tokens}: not below the response budget of {self.max_new_tokens} tokens, so "
                "the critic would never score one; lower it, or use algorithm=prefix_grpo."
            )
        self.replay.check_budget(self.max_new_tokens)
        if not 1 <= self.min_valid <= self.group_size:
            raise ValueError(f"algorithm.min_valid={self.min_valid}: must lie within 1 and group_size={self.group_size}.")
        if not self.grouped and self.audit_fraction:
            raise ValueError("algorithm.grouped=false leaves no groups to audit; set algorithm.audit_fraction=0 too.")

    @property
    def trains_on_refills(self) -> bool:
        return True  # for the entropy of responses from the prompt

    @property
    def optimizers(self) -> dict[str, OptimizerSpec]:
        """The self-critic's, on the same weights as the actor's (Appendix C, Optimization)."""
        c = self.self_critic
        return {"self_critic": OptimizerSpec("policy", "timing_s/update_self_critic", c.betas, c.eps, 0.0, c.clip_grad_norm)}

    def new_memory(self, prompt: SelfCriticPrompt | None, context_limit: int) -> AC2Memory:
        assert prompt is not None
        floor = noise_floor((0.0, 1.0), self.group_size)  # values lie within 0 and 1
        return AC2Memory(self.self_critic, self.readiness, self.entropy, prompt, context_limit, floor)

    # -- lines 4 to 9: what to roll out ----------------------------------------------------------------------------------

    def plan(self, state: PlanState) -> list[PromptRow]:
        """Refills, and a group from each cut state: to its end where the critic is not trusted or is audited, else one chunk."""
        if state.round:
            return []
        assert self.replay is not None
        memory: AC2Memory = state.memory
        rows = self.replay.refill(state, self.max_new_tokens)
        states = self.replay.states(state, self.problems_per_step)
        ready = [i for i, (problem, _) in enumerate(states) if memory.readiness.is_ready(problem.problem_id)]
        audits = audited(ready, self.audit_fraction, state.rng)
        for i, (problem, prefix) in enumerate(states):
            if i in audits:
                rows.append(self._row(memory, problem, prefix, self.group_size, purpose="audit"))
            elif i not in ready:
                rows.append(self._row(memory, problem, prefix, self.group_size))
            elif self.grouped:
                rows.append(self._row(memory, problem, prefix, self.group_size, chunk=True))
            else:
                prefixes = self.replay.prefixes(state, problem.problem_id, self.group_size)
                rows += [self._row(memory, problem, cut, 1, chunk=True) for cut in prefixes]
        return rows

    def _row(
        self, memory: AC2Memory, problem: Problem, prefix: list[int], n: int, chunk: bool = False, purpose: str = "train"
    ) -> PromptRow:
        left = self.max_new_tokens - len(prefix)
        chunk = chunk and self.chunk_tokens < left
        if self.given_references and problem.solution_ids is not None:
            memory.bank.setdefault(problem.problem_id, np.array(problem.solution_ids, np.int32))
        reference = memory.reference(problem.problem_id)
        return PromptRow(
            problem,
            n,
            self.chunk_tokens if chunk else left,
            purpose,
            prefix,
            chunk=chunk,
            ask_value=True,
            reference_ids=reference.tolist() if reference is not None else None,
        )

    # -- lines 10 and 11: endpoint values, advantages, and the self-critic's target ---------------------------------------

    def credit(self, group: Group) -> AC2Credit:
        """`A_i = v_i - mean_j v_j`, or `v - V(s)` where a state has a single chunk; the target is the mean value on the grid."""
        values = np.where(group.self_scored, group.values, group.rewards)
        if len(values) > 1:
            advantages, mask = endpoint_advantages(values, group.self_scored, self.judge_failure, self.invalid_value)
            target = group_target(values, self.min_valid)
            return AC2Credit(advantages, mask, self_critic_target=target, return_std=return_std(values))
        invalid = np.isnan(values)
        lost = invalid & (group.self_scored | (self.judge_failure == "leave_out"))
        if group.prefix_value is None or lost.any():
            return AC2Credit(np.zeros(1), np.zeros(1, bool))  # without a baseline or a value it is left out of both losses
        advantages = np.where(invalid, 0.0, values) - group.prefix_value
        return AC2Credit(advantages, np.ones(1, bool), self_critic_target=None if invalid[0] else round_to_grid(values[0]))

    # -- lines 12 and 13: the critic's error, who becomes ready; pairs and references -------------------------------------

    def observe(self, memory: AC2Memory, groups: list[ObservedGroup], rng: np.random.Generator) -> Metrics:
        """Take a step's groups, in their order. Readiness sees the bank as it was before this step's additions."""
        sampled = [group for group in groups if group.purpose != "refill"]
        sizes = np.array([len(group.rewards) for group in sampled])  # a state without a group has a row for each of its chunks
        were_ready = np.array([memory.readiness.is_ready(group.problem_id) for group in sampled])
        predictions, audits = [], []
        for group in sampled:
            target = group.credit["self_critic_target"]
            error = None if target is None else value_error(group.prefix_value, target)
            if target is None and len(group.rewards) == 1 and group.prefix_value is None:
                error = 1.0  # an invalid baseline is left out of target and loss, and is an error all the same
            predictions.append(PrefixError(group.problem_id, group.prefix_value, error))
            if group.purpose == "audit" and error is not None:
                audits.append(error)
        memory.add_pairs([group for group in sampled if group.credit["self_critic_target"] is not None], rng)
        new = memory.readiness.complete_step(predictions, memory.bank)
        memory.add_references(groups, self.reference_reward, rng)
        observed = observed_metrics(memory, [one.error for one in predictions if one.error is not None], sampled)
        memory.note_answers([group.prefix_value for group in sampled], observed.get("ac2/rank_correlation"))
        ready_fraction = float(sizes[were_ready].sum() / sizes.sum()) if sampled else 0.0
        metrics = {"ac2/newly_ready": float(len(new)), "ac2/ready_fraction": ready_fraction}
        if audits:
            metrics["ac2/audit_mae"] = float(np.mean(audits))
        return metrics | observed

    # -- line 14: actor, critic, actor -------------------------------------------------------------------------------------

    def update(self, learner: Learner, groups: Iterable[dict]) -> Metrics:
        """First actor minibatch, the self-critic, second actor minibatch: one after another on shared weights."""
        batch = learner.receive(groups, {"policy": lambda sample: sample.actor_mask or sample.from_prompt})
        recalled = learner.recall()
        entropy = prompt_entropy(learner, batch)
        offset = self.entropy.next_offset(recalled.values["clip_offset"], entropy)
        clip_high = self.clip_high + offset
        first, second = learner.minibatches(batch, self.minibatches, self.balance_minibatches)

        before = self.improve_actor(learner, first, clip_high)
        lesson = self.improve_self_critic(learner, recalled)
        after = self.improve_actor(learner, second, clip_high)

        lr, streak = self.self_critic.rate.after_step(
            recalled.values["self_critic_lr"], int(recalled.values["streak"]), lesson.change, before.change + after.change
        )
        learner.remember({"clip_offset": offset, "self_critic_lr": lr, "streak": float(streak)})
        actor = [actor_metrics(step) | {"actor/update_norm": step.change} for step in (before, after)]
        return mean_metrics(actor) | self_critic_metrics(lesson) | recalled.metrics | schedule_metrics(clip_high, entropy)

    def improve_actor(self, learner: Learner, minibatch: list[Sample], clip_high: float) -> Step:
        """One clipped step (equation 5)."""

        def loss(tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
            from algorithms.losses import policy_gradient_loss

            return policy_gradient_loss(tokens, self.clip_low, clip_high, self.dual_clip, self.importance_cap)

        trained = [sample for sample in minibatch if sample.actor_mask]
        weightless = 0 if self.weightless_tokens == "left_out" else sum(s.response_length for s in minibatch if not s.actor_mask)
        return learner.step("actor", trained, loss, weightless_tokens=weightless, measure_change=True)

    def improve_self_critic(self, learner: Learner, recalled: Recalled) -> Step:
        """The weighted mean over lessons of their answers' negative log-likelihood, divided by `MAX_ANSWER_TOKENS` (section 3.3).

        The critic answers greedily, so its likelihood is that at temperature 1, whatever the rollouts are sampled at.
        """
        scale = 1.0 / (MAX_ANSWER_TOKENS * max(recalled.weight, 1e-9))

        def loss(tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return -scale * tokens.columns["weight"] * tokens.logprobs, {"ac2/answer_logprob": tokens.logprobs.detach()}

        samples = [sample_of(i, lesson) for i, lesson in enumerate(recalled.lessons)]
        lr = recalled.values["self_critic_lr"]
        return learner.step("self_critic", samples, loss, aggregation="sum", lr=lr, temperature=1.0, measure_change=True)


def sample_of(index: int, lesson: Lesson) -> Sample:
    """A lesson as a sample whose response is the answer."""
    ids = np.concatenate([lesson.context, lesson.answer]).astype(np.int64)
    empty = np.zeros(len(lesson.answer), np.float32)
    return Sample(index, ids, len(lesson.context), empty, advantage=0.0, columns={"weight": lesson.weight})


def self_critic_metrics(step: Step) -> Metrics:
    """What a step of the self-critic logs; its change is 0 where it had no lesson."""
    if not step.tokens:
        return {"ac2/self_critic_update_norm": 0.0}
    return step.logged | {
        "ac2/self_critic_loss": step.loss,
        "ac2/self_critic_lr": step.lr,
        "ac2/self_critic_grad_norm": step.grad_norm,
        "ac2/self_critic_update_norm": step.change,
        "ac2/self_critic_nonfinite_steps": float(step.skipped),
    }
