"""The trainer's primitives: log-probabilities and optimizer steps over sharded weights, the same on any number of ranks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from algorithms.contract import has_actor_loss
from algorithms.critic import MAX_ANSWER_TOKENS
from algorithms.losses import BatchTotals, token_weight
from algorithms.types import (
    CriticExample,
    CriticModelSettings,
    CriticSettings,
    Loss,
    Metrics,
    Recalled,
    Sequence,
    TokenBatch,
    ValueLoss,
)
from pipelines.trainer.batching import microbatches, pad, sequences_of, split_like
from pipelines.trainer.collectives import Ranks
from pipelines.trainer.config import ModelConfig, OptimizerConfig
from pipelines.trainer.optimizer import Meter, Optimizer, accumulate, column
from pipelines.trainer.policy import Policy, load_policy
from pipelines.trainer.residency import Part, Residency
from pipelines.trainer.value_model import Critic


class MemoryLink(Protocol):
    """The way from a rank to the algorithm's memory."""

    def recall(self) -> Recalled:
        """This rank's share of what the memory has for the step's update; collective."""
        ...

    def remember(self, values: Metrics) -> None:
        """Leave values there; collective."""
        ...


class Learner:
    """Implements `algorithms.contract.Learner` on this rank's shard of the policy."""

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        temperature: float,
        horizon: int,
        max_tokens: int,
        device: torch.device,
        stream_timeout_s: float = 3600.0,
        reference_path: str | None = None,
        critic: CriticSettings | None = None,
        critic_model: CriticModelSettings | None = None,
        memory: MemoryLink | None = None,
        offload_idle: bool = False,
    ) -> None:
        self.stream_timeout_s = stream_timeout_s
        self.config, self.model, self.device, self.memory = optimizer, model, device, memory
        self.temperature, self.horizon, self.max_tokens = temperature, horizon, max_tokens
        self.ranks = Ranks(device)
        mesh: DeviceMesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.policy = load_policy(model, mesh, device)
        self.reference: Policy | None = None
        if reference_path is not None:
            reference = ModelConfig(reference_path, model.dtype, gradient_checkpointing=False)
            self.reference = load_policy(reference, mesh, device).eval().requires_grad_(False)
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.optimizer = Optimizer(
            trained,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            clip_grad_norm=optimizer.clip_grad_norm,
            max_nonfinite_steps=optimizer.max_nonfinite_steps,
        )
        self.critic_optimizer: Optimizer | None = None
        if critic is not None:  # on the same weights as the actor's (AC2 Appendix C, Optimization)
            self.critic_optimizer = Optimizer(
                trained,
                betas=critic.betas,
                eps=critic.eps,
                weight_decay=0.0,
                clip_grad_norm=critic.clip_grad_norm,
                max_nonfinite_steps=optimizer.max_nonfinite_steps,
            )
        self.critic: Critic | None = None
        if critic_model is not None:
            begins_as = ModelConfig(critic_model.path or model.path, model.dtype, model.gradient_checkpointing)
            self.critic = Critic(
                critic_model,
                begins_as,
                mesh,
                self.ranks,
                max_tokens=max_tokens,
                max_nonfinite_steps=optimizer.max_nonfinite_steps,
                spent=self._spent,
            )
        parts: dict[str, Part | None] = {"policy": self.policy, "reference": self.reference, "actor": self.optimizer.adamw}
        if self.critic is not None:
            parts |= {"critic": self.critic.model, "critic optimizer": self.critic.optimizer.adamw}
        if self.critic_optimizer is not None:
            parts["policy's critic"] = self.critic_optimizer.adamw
        self.residency = Residency(device, {name: part for name, part in parts.items() if part is not None}, offload_idle)
        self.batches = 0  # rollout batches received
        self.updates = 0  # optimizer steps of the actor
        self.timings: Metrics = {}  # seconds by activity, for the loop to read and clear

    # -- the primitives ----------------------------------------------------------------------------------------------

    def receive(
        self,
        groups: Iterable[dict[str, Any]],
        with_old_logprobs: bool,
        with_ref_logprobs: bool,
        with_values: bool = False,
        logprobs_of: Callable[[Sequence], bool] = has_actor_loss,
    ) -> list[Sequence]:
        """Collect this rank's sequences, computing what is asked for of those that are here while others still generate.

        Forwards are collective, so ranks go in lockstep: each round every rank brings a full micro-batch, or what it has at its
        stream's end, or nothing.
        """
        self.batches += 1
        self.residency.use("policy", "reference", "critic")
        sequences: list[Sequence] = []
        stream = _in_background(groups, self.stream_timeout_s)
        waiting: list[Sequence] = []
        exhausted = False
        while True:
            while not exhausted and _padded_tokens(waiting) < self.max_tokens:
                row = next(stream, None)
                if row is None:
                    exhausted = True
                    break
                arrived = sequences_of(row)
                sequences.extend(arrived)
                waiting.extend(arrived)
            asked = [s for s in waiting if logprobs_of(s)]
            if with_old_logprobs:
                self._forward_all(asked, "old_log_prob", lambda batch: self._store_logprobs(self.policy, batch, "old_logprobs"))
            if with_ref_logprobs and (reference := self.reference) is not None:
                self._forward_all(asked, "ref", lambda batch: self._store_logprobs(reference, batch, "ref_logprobs"))
            if with_values and (critic := self.critic) is not None:
                self._forward_all([s for s in waiting if s.critic_mask], "values", critic.store_values)
            waiting = []
            (unfinished,) = self.ranks.largest([float(not exhausted)])
            if not unfinished:
                return sequences

    def _forward_all(self, sequences: list[Sequence], name: str, forward: Callable[[list[Sequence]], None]) -> None:
        """A forward of every micro-batch; ranks that have fewer bring empty ones."""
        started = time.perf_counter()
        batches = microbatches(sequences, self.max_tokens)
        (rounds,) = self.ranks.largest([len(batches)])
        for i in range(int(rounds)):
            forward(batches[i] if i < len(batches) else [])
        self._spent(name, started)

    def minibatches(self, sequences: list[Sequence], count: int) -> list[list[Sequence]]:
        """Split the step's order of sequences (by `index`, over all ranks) into `count` parts of equal size, give or take one.

        Rollouts that only refill the replay buffer are in none.
        """
        sequences = [s for s in sequences if not s.is_refill]
        order = {index: place for place, index in enumerate(sorted(self.ranks.gather([s.index for s in sequences])))}
        parts: list[list[Sequence]] = [[] for _ in range(count)]
        for sequence in sorted(sequences, key=lambda s: s.index):
            parts[order[sequence.index] * count // len(order)].append(sequence)
        return parts

    def use_all(self) -> None:
        """Have every part on the device, for what reads them all: weight sync and checkpoints."""
        self.residency.use(*self.residency.parts)

    def total(self, values: list[float]) -> list[float]:
        """Each number summed over all ranks."""
        return self.ranks.total(values)

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all ranks, the same list on each."""
        return self.ranks.gather(items)

    def prompt_entropy(self, sequences: list[Sequence]) -> float | None:
        """Mean entropy per token of responses with an empty prefix, over all ranks; None if there is none (AC2 equation 9)."""
        own = [s for s in sequences if s.from_prompt and s.entropy is not None]
        total, tokens = self.ranks.total([sum(s.entropy or 0.0 for s in own), sum(s.response_length for s in own)])
        return total / tokens if tokens else None

    def recall(self) -> Recalled:
        """What the algorithm's memory has for this update, once all groups of the step are in."""
        assert self.memory is not None
        return self.memory.recall()

    def remember(self, values: Metrics) -> None:
        """Leave values with the algorithm's memory, for the next steps."""
        assert self.memory is not None
        self.memory.remember(values)

    def step(
        self, sequences: list[Sequence], loss: Loss, aggregation: str, with_entropy_grad: bool, measure_change: bool = False
    ) -> Metrics:
        """One optimizer step: accumulate gradients over micro-batches, clip, update; skipped everywhere if not finite."""
        started = time.perf_counter()
        sequences = [s for s in sequences if s.actor_mask and s.response_length]
        tokens, count = self.ranks.total([sum(s.response_length for s in sequences), len(sequences)])
        if not count:
            return {"actor/empty_minibatches": 1.0} | ({"actor/update_norm": 0.0} if measure_change else {})
        self.residency.use("policy", "actor")
        totals = BatchTotals(int(tokens), int(count))
        meter = Meter(self.ranks)

        def weight_of(sequence: Sequence) -> float:
            return token_weight(aggregation, sequence.response_length, totals, self.horizon)

        self._accumulate(sequences, loss, weight_of, meter, with_entropy_grad, self.temperature)
        applied = self.optimizer.apply(self.config.lr_at(self.updates), meter.loss(), measure_change)
        self.updates += int(not applied["nonfinite_steps"])
        self._spent("update_actor", started)
        return meter.means(totals.tokens) | {f"actor/{name}": value for name, value in applied.items()}

    def value_step(self, sequences: list[Sequence], loss: ValueLoss, lr: float) -> Metrics:
        """One optimizer step of the critic model."""
        assert self.critic is not None
        self.residency.use("critic", "critic optimizer")
        return self.critic.step(sequences, loss, lr)

    def critic_step(self, examples: list[CriticExample], total_weight: float, lr: float) -> Metrics:
        """One step of the critic's own optimizer on the same weights (AC2 section 3.3): the weighted mean over examples of their
        answers' negative log-likelihood, divided by `MAX_ANSWER_TOKENS`; not at the sampling temperature but at 1."""
        assert self.critic_optimizer is not None
        started = time.perf_counter()
        if not total_weight:
            return {"critic/update_norm": 0.0}
        self.residency.use("policy", "policy's critic")
        meter = Meter(self.ranks)
        sequences = [_lesson(i, example) for i, example in enumerate(examples)]
        (tokens,) = self.ranks.total([sum(len(example.answer) for example in examples)])

        def loss(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return -batch.logprobs * batch.advantages, {"critic/answer_logprob": batch.logprobs.detach()}

        scale = 1.0 / (MAX_ANSWER_TOKENS * total_weight)
        self._accumulate(sequences, loss, lambda s: scale, meter, with_entropy_grad=False, temperature=1.0)
        value_loss = meter.loss()
        applied = self.critic_optimizer.apply(lr, value_loss, measure_change=True)
        self._spent("update_critic", started)
        logged = meter.means(int(tokens)) | {"critic/vf_loss": value_loss}
        return logged | {f"critic/{name}": value for name, value in applied.items()}

    # -- below the primitives ----------------------------------------------------------------------------------------

    def _accumulate(
        self,
        sequences: list[Sequence],
        loss: Loss,
        weight_of: Callable[[Sequence], float],
        meter: Meter,
        with_entropy_grad: bool,
        temperature: float,
    ) -> None:
        """Gradients of the weighted sum of a loss over the tokens of all ranks."""

        def objective(batch: list[Sequence]) -> Tensor:
            token_batch = self._forward(batch, with_entropy_grad, temperature)
            per_token, logged = loss(token_batch)
            weight = column([np.repeat(weight_of(s), s.response_length) for s in batch], self.device)
            meter.add(per_token, weight, logged)
            return (per_token * weight).sum() + 0.0 * token_batch.logprobs.sum()  # an empty batch keeps its graph

        accumulate(self.policy, sequences, self.max_tokens, self.ranks, objective)

    def _forward(self, batch: list[Sequence], entropy_grad: bool, temperature: float) -> TokenBatch:
        """A micro-batch's tokens. Log-probabilities that were not stored are the current ones: of the policy before any update, and
        of a reference that no loss reads."""
        padded = pad(batch, self.device)
        logprobs, entropy = self.policy(
            padded.input_ids, padded.position_ids, padded.select, padded.targets, temperature, entropy_grad
        )

        def stored(values: list[np.ndarray | None]) -> Tensor:
            present = [value for value in values if value is not None]
            return column(present, self.device) if present and len(present) == len(batch) else logprobs.detach()

        return TokenBatch(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=stored([s.old_logprobs for s in batch]),
            rollout_logprobs=column([s.rollout_logprobs for s in batch], self.device),
            ref_logprobs=stored([s.ref_logprobs for s in batch]),
            advantages=column([np.broadcast_to(s.advantage, s.response_length) for s in batch], self.device),
            rewards=column([np.repeat(s.reward, s.response_length) for s in batch], self.device),
        )

    @torch.no_grad()
    def _store_logprobs(self, model: Policy, batch: list[Sequence], column: str) -> None:
        padded = pad(batch, self.device)
        logprobs, entropy = model(padded.input_ids, padded.position_ids, padded.select, padded.targets, self.temperature)
        for sequence, values, entropies in zip(batch, split_like(logprobs, batch), split_like(entropy, batch), strict=True):
            setattr(sequence, column, values)
            if model is self.policy:
                sequence.entropy = float(entropies.sum())

    def _spent(self, name: str, started: float) -> None:
        self.timings[f"timing_s/{name}"] = self.timings.get(f"timing_s/{name}", 0.0) + time.perf_counter() - started


def _lesson(index: int, example: CriticExample) -> Sequence:
    """An example as a sequence whose response is the answer and whose advantage is its weight."""
    ids = np.concatenate([example.context, example.answer]).astype(np.int64)
    return Sequence(index, ids, len(example.context), np.zeros(len(example.answer), np.float32), example.weight)


def _padded_tokens(sequences: list[Sequence]) -> int:
    return len(sequences) * max((len(s.ids) for s in sequences), default=0)


def _in_background(items: Iterable[Any], timeout_s: float) -> Iterator[Any]:
    """Read an iterable in a thread of its own; TimeoutError if nothing comes for `timeout_s`.

    Its reads wait for other ranks (a dataset pass begins when all have asked for it), and so do forwards: in one thread the two
    waits could each hold the other up.
    """
    buffer: queue.Queue[tuple[str, Any]] = queue.Queue()

    def read() -> None:
        try:
            for item in items:
                buffer.put(("item", item))
            buffer.put(("end", None))
        except BaseException as error:  # handed to the consumer
            buffer.put(("error", error))

    threading.Thread(target=read, daemon=True, name="rollout-stream").start()
    while True:
        try:
            kind, value = buffer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no rollout group arrived within cluster.learner.stream_timeout_s={timeout_s:g} s.") from None
        if kind == "item":
            yield value
        elif kind == "error":
            raise value
        else:
            return
