"""The contract between an algorithm and the loop that runs it: three verbs, and what each side offers the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from algorithms.types import (
    Credit,
    CriticExample,
    CriticModelSettings,
    CriticSettings,
    Group,
    Loss,
    Metrics,
    ObservedGroup,
    Problem,
    PromptRow,
    Recalled,
    Sequence,
    StoredTrajectory,
    ValueLoss,
)

if TYPE_CHECKING:
    from algorithms.critic import CriticPrompt
    from algorithms.replay import Replay


def has_actor_loss(sequence: Sequence) -> bool:
    """The sequences whose log-probabilities an actor's loss needs."""
    return sequence.actor_mask


class PlanState(Protocol):
    """What the coordinator lets `plan` see and draw from."""

    @property
    def round(self) -> int:
        """Which round of the step is being planned, from 0."""
        ...

    @property
    def step(self) -> int:
        """The step that is being planned, from 1."""
        ...

    @property
    def kept_groups(self) -> int:
        """Groups of this step that are already generated and kept (0 in its first round)."""
        ...

    @property
    def rng(self) -> np.random.Generator:
        """Randomness of this round; the same in a run that was interrupted and resumed."""
        ...

    @property
    def memory(self) -> Any:
        """What the algorithm made with `new_memory`."""
        ...

    def fresh_problems(self, count: int) -> list[Problem]:
        """The next `count` problems of the shuffled dataset, each once per epoch."""
        ...

    def problem(self, problem_id: str) -> Problem:
        """A problem of the dataset by its id."""
        ...

    def trajectories(self) -> list[StoredTrajectory]:
        """What the replay buffer holds, oldest first."""
        ...

    def prefix(self, trajectory: StoredTrajectory, cut: int) -> list[int]:
        """The first `cut` response tokens of a stored trajectory."""
        ...


class Learner(Protocol):
    """What the trainer offers to `update`; every call is collective over the ranks."""

    @property
    def batches(self) -> int:
        """Rollout batches received in this run, the one in hand included."""
        ...

    def receive(
        self,
        groups: Iterable[dict],
        with_old_logprobs: bool,
        with_ref_logprobs: bool,
        with_values: bool = False,
        logprobs_of: Callable[[Sequence], bool] = has_actor_loss,
    ) -> list[Sequence]:
        """Take this rank's share of the step's groups as they arrive, computing meanwhile the log-probabilities of the sequences
        that `logprobs_of` picks, and the critic model's values of those that it learns from."""
        ...

    def total(self, values: list[float]) -> list[float]:
        """Each number summed over all ranks."""
        ...

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all ranks, the same list on each."""
        ...

    def minibatches(self, sequences: list[Sequence], count: int) -> list[list[Sequence]]:
        """Split the step's global order of sequences into `count` equal parts; each rank gets its members of each."""
        ...

    def prompt_entropy(self, sequences: list[Sequence]) -> float | None:
        """Mean entropy per token of responses with an empty prefix, over all ranks; None if there is none."""
        ...

    def step(
        self, sequences: list[Sequence], loss: Loss, aggregation: str, with_entropy_grad: bool, measure_change: bool = False
    ) -> Metrics:
        """One optimizer step on the loss, aggregated over the tokens of all ranks; if asked `actor/update_norm` too."""
        ...

    def value_step(self, sequences: list[Sequence], loss: ValueLoss, lr: float) -> Metrics:
        """One step of the critic model's optimizer on the loss of its states, weighted, over the number of states of all ranks."""
        ...

    def critic_step(self, examples: list[CriticExample], total_weight: float, lr: float) -> Metrics:
        """One step of the critic's own optimizer on the same weights: the weighted mean over examples of their answers' negative
        log-likelihood over `MAX_ANSWER_TOKENS`; with `critic/update_norm`."""
        ...

    def recall(self) -> Recalled:
        """What the algorithm's memory has for this update, once all groups of the step are in."""
        ...

    def remember(self, values: Metrics) -> None:
        """Leave values with the algorithm's memory, for the next steps."""
        ...


class Memory(Protocol):
    """What an algorithm keeps between steps outside the weights; lives in the coordinator, and checkpoints carry it."""

    def recall(self, rng: np.random.Generator) -> Recalled:
        """What the update of a step needs, for all ranks together."""
        ...

    def remember(self, values: Metrics) -> None:
        """Take what the update left."""
        ...

    def warnings(self) -> list[str]:
        """What a user should know."""
        ...

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """JSON-ready values and arrays, for a checkpoint."""
        ...

    def restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Become what `state` described."""
        ...


class Algorithm(Protocol):
    """What to roll out, how to credit it, and how to learn from it."""

    name: ClassVar[str]

    @property
    def max_rounds(self) -> int:
        """Times a step may ask for more groups."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """The response budget."""
        ...

    @property
    def replay(self) -> Replay | None:
        """The replay buffer it plans from, if any."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether `update` reads the log-probabilities of the initial model."""
        ...

    @property
    def trains_on_refills(self) -> bool:
        """Whether `update` wants to see the rollouts that refill the replay buffer."""
        ...

    @property
    def critic_optimizer(self) -> CriticSettings | None:
        """The optimizer of a critic that is the model itself, if there is one."""
        ...

    @property
    def critic_model(self) -> CriticModelSettings | None:
        """The critic, if it is a model of its own."""
        ...

    def new_memory(self, prompt: CriticPrompt | None, context_limit: int) -> Memory | None:
        """What it remembers between steps, as a new run begins; None if nothing."""
        ...

    def plan(self, state: PlanState) -> list[PromptRow]:
        """The rows of one round of a step; none when the step needs no more."""
        ...

    def credit(self, group: Group) -> Credit:
        """Advantages within one finished group."""
        ...

    def observe(self, memory: Any, groups: list[ObservedGroup], rng: np.random.Generator) -> Metrics:
        """Take a step's groups into the memory, in their order, before the update asks it."""
        ...

    def update(self, learner: Learner, groups: Iterable[dict]) -> Metrics:
        """The optimizer steps, in the paper's order."""
        ...
