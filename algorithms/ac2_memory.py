"""What AC2 remembers between steps outside the weights: readiness, references, the self-critic's pairs, its schedules."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from algorithms.entropy import EntropyControl
from algorithms.noise import inequality, noise_weights
from algorithms.readiness import Readiness, ReadinessConfig
from algorithms.self_critic import SelfCriticPrompt
from algorithms.self_critic_rate import SelfCriticRate
from algorithms.types import Lesson, Metrics, ObservedGroup, Recalled

NEVER_VALID_STEPS = 3  # steps without one grid value from the critic after which a run says so
BLIND_STEPS, BLIND_CORRELATION = 5, 0.3  # steps of so low a rank correlation, with problems ready, after which a run says so


@dataclass(frozen=True)
class SelfCriticConfig:
    """The self-critic's buffer and its update."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "buffer_pairs": (1, math.inf),
        "pairs_per_update": (1, math.inf),
        "clip_grad_norm": (1e-12, math.inf),
        "betas": (0, 0.999999999),
        "eps": (0, 1),
    }

    buffer_pairs: int
    pairs_per_update: int
    clip_grad_norm: float
    betas: tuple[float, float]
    eps: float
    rate: SelfCriticRate
    references: bool
    overlong_reference: str
    noise_normalization: bool

    def __post_init__(self) -> None:
        if self.overlong_reference not in ("plain", "skip"):
            raise ValueError(f"algorithm.self_critic.overlong_reference={self.overlong_reference}: use plain or skip.")


@dataclass(frozen=True)
class Pair:
    """A state and the value that the self-critic shall give it."""

    problem_id: str
    prompt_ids: np.ndarray
    prefix_ids: np.ndarray
    target: float
    spread: float | None  # standard deviation of its group's values


class AC2Memory:
    """Lives in the coordinator; a checkpoint carries it. Everything starts empty (AC2 Appendix C, Replay buffer)."""

    def __init__(
        self,
        critic: SelfCriticConfig,
        readiness: ReadinessConfig,
        entropy: EntropyControl,
        prompt: SelfCriticPrompt,
        context_limit: int,
        spread_floor: float,
    ) -> None:
        self.config, self.prompt, self.context_limit, self.spread_floor = critic, prompt, context_limit, spread_floor
        self.readiness = Readiness(readiness)
        self.bank: dict[str, np.ndarray] = {}  # a reference solution per problem, never replaced
        self.pairs: deque[Pair] = deque(maxlen=critic.buffer_pairs)
        self.clip_offset, self.self_critic_lr, self.streak = entropy.initial, critic.rate.initial, 0
        self.steps_without_value = self.blind_steps = 0

    # -- what a step brings --------------------------------------------------------------------------------------------

    def add_pairs(self, groups: Sequence[ObservedGroup], rng: np.random.Generator) -> None:
        """A pair of each group's prefix and target; the oldest leave when the buffer is full.

        Where a step has more than the buffer holds, as it may without groups, those that enter are drawn at random.
        """
        chosen: Sequence[int] = range(len(groups))
        if len(groups) > self.config.buffer_pairs:
            chosen = sorted(rng.permutation(len(groups))[: self.config.buffer_pairs].tolist())
        for i in chosen:
            group = groups[i]
            target, spread = group.credit["self_critic_target"], group.credit["return_std"]
            self.pairs.append(Pair(group.problem_id, group.prompt_ids, group.prefix_ids, target, spread))

    def add_references(self, groups: Sequence[ObservedGroup], least: float, rng: np.random.Generator) -> int:
        """For each problem without a reference one of this step's rollouts of at least `least`, at random; how many were added."""
        found: dict[str, list[tuple[ObservedGroup, int]]] = {}
        for group in groups:
            if group.problem_id not in self.bank:
                good = np.flatnonzero(np.nan_to_num(group.rewards, nan=-np.inf) >= least)
                found.setdefault(group.problem_id, []).extend((group, int(i)) for i in good)
        chosen = {problem_id: rollouts[rng.integers(len(rollouts))] for problem_id, rollouts in found.items() if rollouts}
        for problem_id, (group, i) in chosen.items():
            self.bank[problem_id] = self.prompt.solution(np.concatenate([group.prefix_ids, group.response(i)]))
        return len(chosen)

    def note_answers(self, predictions: Sequence[float | None], correlation: float | None) -> None:
        """Whether the critic answers with grid values at all, and whether they rank states: their rank correlation with targets."""
        if predictions:
            none = all(prediction is None for prediction in predictions)
            self.steps_without_value = self.steps_without_value + 1 if none else 0
        blind = bool(self.readiness.ready) and correlation is not None and correlation < BLIND_CORRELATION
        self.blind_steps = self.blind_steps + 1 if blind else 0

    # -- what an update asks -------------------------------------------------------------------------------------------

    def recall(self, rng: np.random.Generator) -> Recalled:
        """Up to `pairs_per_update` pairs without replacement, both prompts of those whose problem has a reference, and schedules.

        A pair whose plain prompt exceeds the context is skipped; one whose prompt with the reference does is skipped too, or falls
        back to the plain one (`overlong_reference`). A problem's reference in the bank is for good, so it is also its pairs'.
        """
        drawn: list[tuple[Pair, list[np.ndarray]]] = []
        skipped = fallen_back = 0
        for i in rng.permutation(len(self.pairs)):
            if len(drawn) == self.config.pairs_per_update:
                break
            pair = self.pairs[i]
            prompts = [self.prompt.query(pair.prompt_ids, pair.prefix_ids, None)]
            if self._too_long(prompts[0], pair):
                skipped += 1
                continue
            if (reference := self.reference(pair.problem_id)) is not None:
                informed = self.prompt.query(pair.prompt_ids, pair.prefix_ids, reference)
                if not self._too_long(informed, pair):
                    prompts.append(informed)
                elif self.config.overlong_reference == "skip":
                    skipped += 1
                    continue
                else:
                    fallen_back += 1
            drawn.append((pair, prompts))
        weights = self._weights([pair for pair, _ in drawn])
        lessons = [
            Lesson(prompt, self.prompt.answer(pair.target), weight / len(prompts))
            for (pair, prompts), weight in zip(drawn, weights.tolist(), strict=True)
            for prompt in prompts
        ]
        values = {"clip_offset": self.clip_offset, "self_critic_lr": self.self_critic_lr, "streak": float(self.streak)}
        metrics = {
            "ac2/pairs": float(len(drawn)),
            "ac2/overlong_pairs": float(skipped),
            "ac2/overlong_references": float(fallen_back),
        }
        if self.config.noise_normalization and drawn:
            mean, largest, top = inequality(weights)
            metrics |= {"ac2/noise_weight/mean": mean, "ac2/noise_weight/max": largest, "ac2/noise_weight/top_share": top}
        return Recalled(values, lessons, float(len(drawn)), metrics)

    def _too_long(self, question: np.ndarray, pair: Pair) -> bool:
        return len(question) + len(self.prompt.answer(pair.target)) > self.context_limit

    def _weights(self, pairs: list[Pair]) -> np.ndarray:
        """What each pair counts; mean one."""
        if not self.config.noise_normalization:
            return np.ones(len(pairs))
        return noise_weights(np.array([np.nan if pair.spread is None else pair.spread for pair in pairs], float), self.spread_floor)

    def remember(self, values: Metrics) -> None:
        """The schedules after an update."""
        self.clip_offset, self.self_critic_lr, self.streak = values["clip_offset"], values["self_critic_lr"], int(values["streak"])

    def reference(self, problem_id: str) -> np.ndarray | None:
        """The solution that the critic is shown with a problem, if it is shown any."""
        return self.bank.get(problem_id) if self.config.references else None

    def warnings(self) -> list[str]:
        """What a user should know."""
        found = []
        if self.steps_without_value >= NEVER_VALID_STEPS:
            found.append(
                f"the critic has answered with no grid value for {self.steps_without_value} steps: no problem can become "
                "ready, and the run is one of Prefix GRPO; look at model.self_critic_prompt, or fine-tune the model on values "
                "first (pipelines.sft)"
            )
        if self.blind_steps >= BLIND_STEPS:
            found.append(
                f"for {self.blind_steps} steps the critic's values have hardly ranked the states (ac2/rank_correlation below "
                f"{BLIND_CORRELATION}), however small its error: it may be near a constant; audit more, or lower "
                "algorithm.readiness.local_threshold"
            )
        return found

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """JSON-ready values and arrays."""
        values = {
            "readiness": self.readiness.state(),
            "clip_offset": self.clip_offset,
            "self_critic_lr": self.self_critic_lr,
            "streak": self.streak,
            "steps_without_value": self.steps_without_value,
            "blind_steps": self.blind_steps,
            "bank": list(self.bank),
            "pairs": [[pair.problem_id, pair.target, pair.spread] for pair in self.pairs],
        }
        lists = {
            "bank": list(self.bank.values()),
            "pair_prompts": [pair.prompt_ids for pair in self.pairs],
            "pair_prefixes": [pair.prefix_ids for pair in self.pairs],
        }
        return values, {name: array for key, ids in lists.items() for name, array in _packed(key, ids).items()}

    def restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Become what `state` described."""
        self.readiness = Readiness.restored(self.readiness.config, values["readiness"])
        self.remember(values)
        self.steps_without_value, self.blind_steps = values["steps_without_value"], values["blind_steps"]
        self.bank = dict(zip(values["bank"], unpacked("bank", arrays), strict=True))
        prompts, prefixes = unpacked("pair_prompts", arrays), unpacked("pair_prefixes", arrays)
        pairs = zip(values["pairs"], prompts, prefixes, strict=True)
        self.pairs.clear()
        self.pairs.extend(Pair(problem_id, prompt, prefix, *rest) for (problem_id, *rest), prompt, prefix in pairs)


def _packed(name: str, ids: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Lists of token ids as one array and their lengths."""
    flat = np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, np.int32)
    return {name: flat, f"{name}_lengths": np.array([len(one) for one in ids], np.int64)}


def unpacked(name: str, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The lists of token ids of one name in a memory's arrays."""
    return np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1]) if len(arrays[f"{name}_lengths"]) else []


def observed_metrics(memory: AC2Memory, errors: Sequence[float], groups: Sequence[ObservedGroup]) -> Metrics:
    """What shows whether the critic may be trusted, and whether it is more than a constant (AC2 Figure 2)."""
    found: dict[str, Any] = {
        "ac2/references": len(memory.bank),
        "ac2/stored_pairs": len(memory.pairs),
        "ac2/ready_problems": len(memory.readiness.ready),
    }
    if groups:
        found["ac2/invalid_prefix_fraction"] = np.mean([g.prefix_value is None for g in groups])
        found["ac2/targetless_fraction"] = np.mean([g.credit["self_critic_target"] is None for g in groups])
    if errors:
        found["ac2/critic_mae"] = np.mean(errors)
        found["ac2/global_error"] = memory.readiness.global_error()
    answered = [(g.prefix_value, g.credit["self_critic_target"]) for g in groups]
    valid = np.array([pair for pair in answered if None not in pair])
    if len(valid) > 1:
        found["ac2/prediction_std"] = valid[:, 0].std()
        found["ac2/rank_correlation"] = rank_correlation(valid[:, 0], valid[:, 1])
    return {name: float(value) for name, value in found.items()}


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation, ties at their mean rank; 0 where one side is constant."""
    ra, rb = _ranks(a), _ranks(b)
    spread = ra.std() * rb.std()
    return float(((ra - ra.mean()) * (rb - rb.mean())).mean() / spread) if spread else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
