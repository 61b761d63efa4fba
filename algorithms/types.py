"""The records that algorithms and the loop that runs them exchange.

Nothing here knows of Ray, vLLM or a file: an algorithm can be read, tested and re-stated with torch and numpy alone. Planning and
credit need numpy only, so torch (seconds to import) is loaded by what computes losses and by nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.value_heads import ValueBatch, ValueHead


Metrics = dict[str, float]


@dataclass(frozen=True)
class Problem:
    """One row of a dataset, rendered: the token ids of its prompt and what its verifier needs to know."""

    problem_id: str
    data_source: str
    prompt_ids: list[int]
    ground_truth: str
    extra_info: str = "{}"  # JSON
    reference_solution: str | None = None


@dataclass(frozen=True)
class PromptRow:
    """A state to continue: a problem, the part of a response already there, how many continuations and how long."""

    problem: Problem
    n: int
    max_new_tokens: int
    purpose: str = "train"  # train | refill | audit | eval
    prefix_ids: list[int] = field(default_factory=list)
    chunk: bool = False  # where a continuation is cut off, the critic scores it
    ask_critic: bool = False  # for the value of the state itself
    reference_ids: list[int] | None = None  # a solution of the problem, for the critic's prompt


@dataclass(frozen=True)
class StoredTrajectory:
    """What a plan may know of a rollout in the replay buffer."""

    sequence: int  # counts the trajectories ever stored
    problem_id: str
    length: int  # response tokens
    reward: float | None
    step: int  # that made it


@dataclass(frozen=True)
class Group:
    """The judged continuations of one prompt row, as `credit` sees them; all arrays have shape [n]."""

    rewards: np.ndarray  # float, NaN where the judge gave none
    truncated: np.ndarray  # bool, cut off by the token budget
    lengths: np.ndarray  # int, new tokens
    values: np.ndarray  # float, the critic's of each endpoint; NaN where it was not asked or answered with none
    from_critic: np.ndarray  # bool, whether the endpoint is the critic's to score and not the judge's
    prefix_value: float | None = None  # the critic's of the state; None where it was not asked or answered with none


@dataclass(frozen=True)
class Credit:
    """What `credit` adds to a group; arrays have shape [n]."""

    advantages: np.ndarray  # float
    actor_mask: np.ndarray  # bool, False keeps a continuation out of the actor's loss
    keep: bool = True  # False: the group teaches nothing and may be replaced
    critic_target: float | None = None  # what the critic shall say of the state
    critic_mask: np.ndarray | None = None  # bool, what a critic model learns from; None: nothing
    return_std: float | None = None  # spread of the group's returns; None where it is not known or not asked for


@dataclass(frozen=True)
class ObservedGroup:
    """A credited group as an algorithm's memory sees it."""

    problem_id: str
    purpose: str
    prompt_ids: np.ndarray
    prefix_ids: np.ndarray
    prefix_value: float | None
    critic_target: float | None
    rewards: np.ndarray  # float, [n], NaN where there is none
    return_std: float | None  # spread of the group's values, where `credit` gave it
    response: Callable[[int], np.ndarray]  # new tokens of a continuation; a paper's step is too large to hold all as objects


@dataclass(frozen=True)
class CriticExample:
    """One prompt of the critic with its answer, and what it counts."""

    context: np.ndarray  # int
    answer: tuple[int, ...]
    weight: float


@dataclass
class Sequence:
    """One continuation as the trainer holds it: prompt, prefix and response in one array of token ids."""

    index: int  # its place in the step's global order, which decides its minibatch
    ids: np.ndarray  # int, [prompt + prefix + response]
    prompt_length: int  # prompt + prefix: tokens that get no loss
    rollout_logprobs: np.ndarray  # float, [response], by the engine
    advantage: float | np.ndarray  # of the response, or [response] of its tokens
    actor_mask: bool = True
    group: int = 0  # the row it belongs to
    reward: float = math.nan  # NaN where there is none
    critic_mask: bool = False  # whether a critic model learns from it
    return_std: float | None = None  # of its group
    critic_weight: float = 1.0  # in the critic model's loss
    is_refill: bool = False  # of a rollout for the replay buffer: in no minibatch
    from_prompt: bool = True  # its prefix is empty
    entropy: float | None = None  # nats, summed over the response, by the trainer before this step's first update
    old_logprobs: np.ndarray | None = None  # float, [response], by the trainer before this step's first update
    ref_logprobs: np.ndarray | None = None  # float, [response], by the reference model
    values: np.ndarray | None = None  # float, [response], by the critic model before this step's first update
    returns: np.ndarray | None = None  # float, [response], its targets

    @property
    def response_length(self) -> int:
        return len(self.ids) - self.prompt_length


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of one micro-batch, concatenated; every tensor has shape [tokens]."""

    logprobs: Tensor  # with gradient
    entropy: Tensor  # nats, at the sampling temperature; with gradient when the loss asks for it
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    rewards: Tensor  # of the whole response, at each of its tokens


# A loss maps a token batch to its per-token loss and to per-token quantities worth logging (token means, or maxima for
# names ending in "max").
Loss = Callable[[TokenBatch], "tuple[Tensor, dict[str, Tensor]]"]
ValueLoss = Callable[["ValueBatch"], "tuple[Tensor, dict[str, Tensor]]"]


@dataclass(frozen=True)
class Recalled:
    """What an algorithm's memory has for an update, once all groups of the step are in: schedules, and this rank's lessons."""

    values: Metrics  # the same on every rank
    examples: list[CriticExample]  # a rank's share, or all
    weight: float  # of all ranks' examples together
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class CriticSettings:
    """What the loop does for an algorithm whose critic is the model itself: its optimizer on the shared weights."""

    clip_grad_norm: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True)
class CriticModelSettings:
    """What the loop does for an algorithm whose critic is a model of its own: where it begins, its head, its optimizer."""

    path: str | None  # a model folder or a critic of another run's checkpoint; None: where the policy begins
    head: ValueHead
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad_norm: float
    lr_warmup_steps: int


def mean_metrics(metrics: list[Metrics]) -> Metrics:
    """The mean of each metric over several updates (its largest value for names ending in "max")."""
    merged: Metrics = {}
    for name in sorted({name for one in metrics for name in one}):
        values = [one[name] for one in metrics if name in one]
        merged[name] = max(values) if name.endswith("max") else sum(values) / len(values)
    return merged
