"""The records that algorithms and the loop that runs them exchange.

Nothing here knows of Ray, vLLM or a file: an algorithm can be read, tested and re-stated with torch and numpy alone. Planning and
credit need numpy only, so torch (seconds to import) is loaded by what computes losses and by nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.value_heads import ValueHead


Metrics = dict[str, float]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


# -- what is rolled out ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One row of a dataset, rendered: the token ids of its prompt and what its verifier needs to know."""

    problem_id: str
    data_source: str
    prompt_ids: list[int]
    ground_truth: str  # JSON, as `extra_info`
    extra_info: str = "{}"
    solution_ids: list[int] | None = None  # a reference solution, where the row brings one
    place: str = field(default="", compare=False)  # file and row, for messages


@dataclass(frozen=True)
class PromptRow:
    """A state to continue: a problem, the part of a response already there, how many continuations and how long."""

    problem: Problem
    n: int
    max_new_tokens: int
    purpose: str = "train"  # train | refill | audit | eval
    prefix_ids: list[int] = field(default_factory=list)
    chunk: bool = False  # `max_new_tokens` ends a chunk and not the response budget: the self-critic scores what is cut off there
    ask_value: bool = False  # ask the self-critic for the value of the state itself
    reference_ids: list[int] | None = None  # a solution of the problem, for the self-critic's prompt


@dataclass(frozen=True)
class StoredTrajectory:
    """What a plan may know of a rollout in the replay buffer."""

    sequence: int  # counts the trajectories ever stored
    problem_id: str
    length: int  # response tokens
    reward: float | None
    step: int  # the step that made it


@dataclass(frozen=True)
class Group:
    """The judged continuations of one prompt row, as `credit` sees them; all arrays have shape [n]."""

    rewards: Floats  # NaN where the judge gave none
    truncated: Bools  # the response budget was exhausted; false where a chunk ended at its length
    values: Floats  # the self-critic's of each endpoint; NaN where it was not asked or gave none
    self_scored: Bools  # whether the endpoint is the self-critic's to score and not the judge's
    prefix_value: float | None = None  # the self-critic's of the state; None where it was not asked or gave none


@dataclass(frozen=True)
class Credit:
    """What `credit` adds to a group. Each field becomes a column of the rows that flow: arrays [n], numbers, or None.

    An algorithm that needs more subclasses this and names the subclass as its `credit_type`; samples then have the further fields
    in `Sample.credit`, and its memory has them in `ObservedGroup.credit`.
    """

    advantages: Floats
    actor_mask: Bools  # False keeps a continuation out of the actor's loss
    keep: bool = True  # False: the group teaches nothing and may be replaced


def further_fields(credit_type: type[Credit]) -> list[str]:
    """The fields that an algorithm's Credit has beyond the common ones."""
    common = {one.name for one in fields(Credit)}
    return [one.name for one in fields(credit_type) if one.name not in common]


@dataclass(frozen=True)
class ObservedGroup:
    """A credited group as an algorithm's memory sees it."""

    problem_id: str
    purpose: str
    prompt_ids: np.ndarray
    prefix_ids: np.ndarray
    prefix_value: float | None
    rewards: Floats  # [n], NaN where there is none
    credit: Mapping[str, Any]  # further fields of the algorithm's Credit
    response: Callable[[int], np.ndarray]  # new tokens of a continuation; a paper's step is too large to hold all as objects


# -- what is learned ---------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """One continuation as the trainer holds it: prompt, prefix and response in one array of token ids."""

    index: int  # its place in the step's global order, which decides its minibatch
    ids: np.ndarray  # int, [prompt + prefix + response]
    prompt_length: int  # prompt + prefix: tokens that get no loss
    rollout_logprobs: np.ndarray  # float, [response], by the engine
    advantage: float | np.ndarray  # the response's, or [response] its tokens'
    actor_mask: bool = True
    group: int = 0  # the row it belongs to
    purpose: str = "train"
    reward: float = math.nan  # NaN where there is none
    from_prompt: bool = True  # its prefix is empty
    credit: Mapping[str, Any] = field(default_factory=dict)  # further fields of its group's Credit; of an array its own entry
    entropy: np.ndarray | None = None  # float, [response], nats, by the policy before this step's first update
    old_logprobs: np.ndarray | None = None  # float, [response], by the policy before this step's first update
    ref_logprobs: np.ndarray | None = None  # float, [response], by the reference model
    values: np.ndarray | None = None  # float, [response], by the value model before this step's first update
    columns: dict[str, float | np.ndarray] = field(default_factory=dict)  # the algorithm's own: [response], or one for all tokens

    @property
    def response_length(self) -> int:
        return len(self.ids) - self.prompt_length


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of one micro-batch under the policy, concatenated; every tensor has shape [tokens]."""

    logprobs: Tensor  # with gradient
    entropy: Tensor  # nats, at the sampling temperature; with gradient when the loss asks for it
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    rewards: Tensor  # the whole response's, at each of its tokens
    sequence: Tensor  # int64, which of the micro-batch's sequences a token belongs to
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # those of the samples, by name

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean of `values` over each token's sequence, at each of its tokens; [tokens] -> [tokens], differentiable."""
        count = int(self.sequence.max()) + 1 if len(self.sequence) else 0
        sums = values.new_zeros(count).index_add(0, self.sequence, values)
        return (sums / self.sequence.bincount(minlength=count))[self.sequence]


@dataclass(frozen=True)
class StateBatch:
    """The response states of one micro-batch under the value model, concatenated; `outputs` [tokens, outputs], others [tokens]."""

    outputs: Tensor  # the head's, with gradient
    old_values: Tensor  # before this step's first update
    sequence: Tensor  # int64, which of the micro-batch's sequences a state belongs to
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # those of the samples, by name


# A loss maps a batch to its per-token loss and to per-token quantities worth logging, by metric name (token means, or maxima for
# names ending in "max").
TokenLoss = Callable[[TokenBatch], "tuple[Tensor, dict[str, Tensor]]"]
StateLoss = Callable[[StateBatch], "tuple[Tensor, dict[str, Tensor]]"]


@dataclass(frozen=True)
class Step:
    """What one optimizer step did."""

    tokens: int  # over all ranks; 0: there was nothing to learn from, and nothing was done
    loss: float = 0.0
    grad_norm: float = 0.0  # before clipping; 0 where the step was skipped
    lr: float = 0.0
    skipped: bool = False  # for a loss or gradient that was not finite
    change: float = 0.0  # norm of the change of all parameters, where it was asked for
    logged: Metrics = field(default_factory=dict)  # what the loss logs, over all ranks


@dataclass(frozen=True)
class OptimizerSpec:
    """An AdamW that an algorithm asks for beside the actor's."""

    model: str  # policy | value: the parameters that it moves
    timing: str  # the metric of the seconds that its steps take
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad_norm: float


@dataclass(frozen=True)
class ValueModelSpec:
    """A value model that an algorithm asks for: where it begins, and its head."""

    path: str | None  # a model folder or the `critic/` of another run's checkpoint; None: where the policy begins
    head: ValueHead
    head_seed: int | None = None  # of a new head; None: a head of zeros


# -- what is remembered ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """A question to the self-critic with the answer that it shall give, and what it counts."""

    context: np.ndarray  # int
    answer: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class Recalled:
    """What an algorithm's memory has for an update, once all groups of the step are in: schedules, and this rank's lessons."""

    values: Metrics  # the same on every rank
    lessons: list[Lesson]  # a rank's share, or all
    weight: float  # sum over all ranks' lessons
    metrics: Metrics = field(default_factory=dict)


def mean_metrics(metrics: list[Metrics]) -> Metrics:
    """The mean of each metric over several updates (its largest value for names ending in "max")."""
    merged: Metrics = {}
    for name in sorted({name for one in metrics for name in one}):
        values = [one[name] for one in metrics if name in one]
        merged[name] = max(values) if name.endswith("max") else sum(values) / len(values)
    return merged
