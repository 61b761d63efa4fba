"""The trainer's primitives: log-probabilities and optimizer steps over sharded weights, the same on any number of ranks."""

from __future__ import annotations

import math
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
from torch.distributed.tensor import DTensor

from algorithms.critic import MAX_ANSWER_TOKENS
from algorithms.losses import BatchTotals, token_weight
from algorithms.types import CriticExample, CriticSettings, Loss, Metrics, Recalled, Sequence, TokenBatch
from pipelines.batching import microbatches, pad, sequences_of, split_like
from pipelines.model import Policy, load_policy, sync_gradients
from pipelines.settings import ModelConfig, OptimizerConfig


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


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
        memory: MemoryLink | None = None,
    ) -> None:
        self.stream_timeout_s = stream_timeout_s
        self.config, self.model, self.device, self.memory = optimizer, model, device, memory
        self.temperature = temperature
        self.mesh: DeviceMesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.policy = load_policy(model, self.mesh, device)
        self.reference: Policy | None = None
        if reference_path is not None:
            reference = ModelConfig(reference_path, model.dtype, gradient_checkpointing=False)
            self.reference = load_policy(reference, self.mesh, device).eval().requires_grad_(False)
        self.trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
        )
        self.critic, self.critic_optimizer = critic, None
        if critic is not None:  # on the same weights as the actor's (AC2 Appendix C, Optimization)
            self.critic_optimizer = torch.optim.AdamW(self.trained, betas=critic.betas, eps=critic.eps, weight_decay=0.0)
        self.horizon, self.max_tokens = horizon, max_tokens
        self.updates = 0  # optimizer steps taken
        self.nonfinite_in_a_row = 0
        self.timings: Metrics = {}  # seconds by activity, for the loop to read and clear

    # -- the primitives ----------------------------------------------------------------------------------------------

    def receive(
        self,
        groups: Iterable[dict[str, Any]],
        with_old_logprobs: bool,
        with_ref_logprobs: bool,
        with_prompt_entropy: bool = False,
    ) -> list[Sequence]:
        """Collect this rank's sequences, computing log-probabilities for those that are here while others still generate.

        Forwards are collective, so ranks go in lockstep: each round every rank brings a full micro-batch, or what it has at its
        stream's end, or nothing. Sequences without a part in the actor's loss are kept out of the forwards, unless they start from
        the prompt and the entropy of those is asked for.
        """
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
                if with_old_logprobs or with_ref_logprobs:
                    waiting.extend(s for s in arrived if s.actor_mask or (with_prompt_entropy and s.from_prompt))
            started = time.perf_counter()
            batches = microbatches(waiting, self.max_tokens)
            waiting = []
            rounds, unfinished = self._max([len(batches), float(not exhausted)])
            for i in range(int(rounds)):
                batch = batches[i] if i < len(batches) else []
                if with_old_logprobs:
                    self._store_logprobs(self.policy, batch, "old_logprobs")
                if with_ref_logprobs and self.reference is not None:
                    self._store_logprobs(self.reference, batch, "ref_logprobs")
            self._spent("old_log_prob", started)
            if not unfinished:
                return sequences

    def minibatches(self, sequences: list[Sequence], count: int) -> list[list[Sequence]]:
        """Split the step's order of sequences (by `index`, over all ranks) into `count` parts of equal size, give or take one.

        Rollouts that only refill the replay buffer are in none.
        """
        sequences = [s for s in sequences if not s.is_refill]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [s.index for s in sequences])
        order = {index: place for place, index in enumerate(sorted(i for part in gathered for i in part))}
        parts: list[list[Sequence]] = [[] for _ in range(count)]
        for sequence in sorted(sequences, key=lambda s: s.index):
            parts[order[sequence.index] * count // len(order)].append(sequence)
        return parts

    def prompt_entropy(self, sequences: list[Sequence]) -> float | None:
        """Mean entropy per token of responses with an empty prefix, over all ranks; None if there is none (AC2 equation 9)."""
        own = [s for s in sequences if s.from_prompt and s.entropy is not None]
        total, tokens = self._sum([sum(s.entropy or 0.0 for s in own), sum(s.response_length for s in own)])
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
        tokens, count = self._sum([sum(s.response_length for s in sequences), len(sequences)])
        if not count:
            return {"actor/empty_minibatches": 1.0} | ({"actor/update_norm": 0.0} if measure_change else {})
        totals = BatchTotals(int(tokens), int(count))
        meter = _Meter(self.device)
        self._accumulate(
            sequences, loss, lambda s: token_weight(aggregation, s.response_length, totals, self.horizon), meter, with_entropy_grad
        )
        lr = self.config.lr_at(self.updates)
        applied = self._apply(self.optimizer, lr, self.config.clip_grad_norm, meter.loss(self), measure_change)
        self.updates += int(not applied["nonfinite_steps"])
        self._spent("update_actor", started)
        return meter.means(self, totals) | {f"actor/{name}": value for name, value in applied.items()}

    def critic_step(self, examples: list[CriticExample], total_weight: float, lr: float) -> Metrics:
        """One step of the critic's own optimizer on the same weights (AC2 section 3.3): the weighted mean over examples of their
        answers' negative log-likelihood, divided by `MAX_ANSWER_TOKENS`; not at the sampling temperature but at 1."""
        assert self.critic is not None
        assert self.critic_optimizer is not None
        started = time.perf_counter()
        if not total_weight:
            return {"critic/update_norm": 0.0}
        meter = _Meter(self.device)
        sequences = [_lesson(i, example) for i, example in enumerate(examples)]
        (tokens,) = self._sum([sum(len(example.answer) for example in examples)])

        def loss(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return -batch.logprobs * batch.advantages, {"critic/answer_logprob": batch.logprobs.detach()}

        scale = 1.0 / (MAX_ANSWER_TOKENS * total_weight)
        self._accumulate(sequences, loss, lambda s: scale, meter, temperature=1.0)
        value_loss = meter.loss(self)
        applied = self._apply(self.critic_optimizer, lr, self.critic.clip_grad_norm, value_loss, measure_change=True)
        self._spent("update_critic", started)
        logged = meter.means(self, BatchTotals(int(tokens), len(examples))) | {"critic/vf_loss": value_loss}
        return logged | {f"critic/{name}": value for name, value in applied.items()}

    # -- below the primitives ----------------------------------------------------------------------------------------

    def _accumulate(
        self,
        sequences: list[Sequence],
        loss: Loss,
        weight_of: Callable[[Sequence], float],
        meter: _Meter,
        with_entropy_grad: bool = False,
        temperature: float | None = None,
    ) -> None:
        """Gradients of the weighted sum of a loss over the tokens of all ranks, micro-batch by micro-batch."""
        batches = microbatches(sequences, self.max_tokens)
        (rounds,) = self._max([len(batches)])
        for i in range(int(rounds)):
            batch = batches[i] if i < len(batches) else []
            sync_gradients(self.policy, i == int(rounds) - 1)
            token_batch = self._forward(batch, with_entropy_grad, temperature or self.temperature)
            per_token, logged = loss(token_batch)
            weight = as_tensor(np.repeat([weight_of(s) for s in batch], [s.response_length for s in batch]), self.device)
            # FSDP averages over ranks; the weights already count all ranks. A dummy's empty sum keeps its graph alive.
            objective = (per_token * weight).sum() * dist.get_world_size()
            (objective + 0.0 * token_batch.logprobs.sum()).backward()
            meter.add(per_token, weight, logged)

    def _forward(self, batch: list[Sequence], entropy_grad: bool, temperature: float) -> TokenBatch:
        padded = pad(batch, self.device)
        logprobs, entropy = self.policy(
            padded.input_ids, padded.position_ids, padded.select, padded.targets, temperature, entropy_grad
        )
        rollout = _concatenate([s.rollout_logprobs for s in batch])

        def column(values: list[np.ndarray | None]) -> Tensor:
            present = [value for value in values if value is not None]
            return as_tensor(_concatenate(present) if len(present) == len(batch) else rollout, self.device)

        return TokenBatch(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=column([s.old_logprobs for s in batch]),
            rollout_logprobs=as_tensor(rollout, self.device),
            ref_logprobs=column([s.ref_logprobs for s in batch]),
            advantages=as_tensor(np.repeat([s.advantage for s in batch], [s.response_length for s in batch]), self.device),
        )

    @torch.no_grad()
    def _store_logprobs(self, model: Policy, batch: list[Sequence], column: str) -> None:
        padded = pad(batch, self.device)
        logprobs, entropy = model(padded.input_ids, padded.position_ids, padded.select, padded.targets, self.temperature)
        for sequence, values, entropies in zip(batch, split_like(logprobs, batch), split_like(entropy, batch), strict=True):
            setattr(sequence, column, values)
            if model is self.policy:
                sequence.entropy = float(entropies.sum())

    def _apply(self, optimizer: torch.optim.Optimizer, lr: float, max_norm: float, loss: float, measure_change: bool) -> Metrics:
        """Clip and update, or skip on all ranks alike: the norm is a global quantity, so every rank decides the same."""
        grad_norm = _whole(torch.nn.utils.clip_grad_norm_(self.trained, max_norm))
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        applied = {"grad_norm": grad_norm if finite else 0.0, "lr": lr, "nonfinite_steps": float(not finite)}
        before = [parameter.detach().clone() for parameter in self.trained] if measure_change and finite else []
        if finite:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        if measure_change:
            changes = [new.detach() - old for new, old in zip(self.trained, before, strict=False)]
            applied["update_norm"] = _whole(torch.nn.utils.get_total_norm(changes)) if changes else 0.0
        optimizer.zero_grad(set_to_none=True)
        self.nonfinite_in_a_row = 0 if finite else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row >= self.config.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self.nonfinite_in_a_row} optimizer steps in a row had a non-finite loss ({loss}) or gradient ({grad_norm}); "
                "nothing of them was applied: lower optimizer.lr or look at the last sample rollouts."
            )
        return applied

    def _spent(self, name: str, started: float) -> None:
        self.timings[f"timing_s/{name}"] = self.timings.get(f"timing_s/{name}", 0.0) + time.perf_counter() - started

    def _sum(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def _max(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()


class _Meter:
    """Sums what a loss logs over micro-batches, then over ranks: token means, and maxima for names ending in "max"."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.values: dict[str, Tensor] = {}

    def add(self, per_token: Tensor, weight: Tensor, logged: dict[str, Tensor]) -> None:
        self.loss_sum += (per_token.detach() * weight).sum()
        for name, value in logged.items():
            value = value.detach().double()
            if name.endswith("max"):
                before = self.values.get(name, torch.full((), -math.inf, dtype=torch.float64, device=self.device))
                self.values[name] = torch.maximum(before, value.max()) if len(value) else before
            else:
                self.values[name] = self.values.get(name, torch.zeros((), dtype=torch.float64, device=self.device)) + value.sum()

    def loss(self, learner: Learner) -> float:
        return learner._sum([float(self.loss_sum)])[0]

    def means(self, learner: Learner, totals: BatchTotals) -> Metrics:
        names = sorted(self.values)
        maxima = [name for name in names if name.endswith("max")]
        means = [name for name in names if not name.endswith("max")]
        summed = learner._sum([float(self.values[name]) for name in means])
        return dict(zip(means, (value / totals.tokens for value in summed), strict=True)) | dict(
            zip(maxima, learner._max([float(self.values[name]) for name in maxima]), strict=True)
        )


def as_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """A float32 tensor of a numpy array on a device."""
    return torch.as_tensor(np.ascontiguousarray(values), dtype=torch.float32, device=device)


def _whole(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _lesson(index: int, example: CriticExample) -> Sequence:
    """An example as a sequence whose response is the answer and whose advantage is its weight."""
    ids = np.concatenate([example.context, example.answer]).astype(np.int64)
    return Sequence(index, ids, len(example.context), np.zeros(len(example.answer), np.float32), example.weight)


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.float32)


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
