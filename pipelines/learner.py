"""The trainer's primitives: log-probabilities and optimizer steps over sharded weights, the same on any number of ranks."""

import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from algorithms.losses import BatchTotals, token_weight
from algorithms.types import Loss, Metrics, Sequence, TokenBatch
from pipelines.batching import microbatches, pad, sequences_of, split_like
from pipelines.model import Policy, load_policy, sync_gradients
from pipelines.settings import ModelConfig, OptimizerConfig


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


class Learner:
    """Implements `algorithms.types.Learner` on this rank's shard of the policy."""

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
    ) -> None:
        self.stream_timeout_s = stream_timeout_s
        self.config, self.model, self.device = optimizer, model, device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.policy = load_policy(model, self.mesh, device, temperature)
        self.reference: Policy | None = None
        if reference_path is not None:
            reference = ModelConfig(reference_path, model.dtype, gradient_checkpointing=False)
            self.reference = load_policy(reference, self.mesh, device, temperature).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.policy.parameters() if parameter.requires_grad],
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self.horizon, self.max_tokens = horizon, max_tokens
        self.updates = 0  # optimizer steps taken
        self.nonfinite_in_a_row = 0
        self.timings: Metrics = {}  # seconds by activity, for the loop to read and clear

    # -- the primitives ----------------------------------------------------------------------------------------------

    def receive(self, groups: Iterable[dict[str, Any]], with_old_logprobs: bool, with_ref_logprobs: bool) -> list[Sequence]:
        """Collect this rank's sequences, computing log-probabilities for those that are here while others still generate.

        Forwards are collective, so ranks go in lockstep: each round every rank brings a full micro-batch, or what it has at its
        stream's end, or nothing. Sequences without a part in the actor's loss are kept out of the forwards.
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
                    waiting.extend(s for s in arrived if s.actor_mask)
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
        """Split the step's order of sequences (by `index`, over all ranks) into `count` parts of equal size, give or take one."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [s.index for s in sequences])
        order = {index: place for place, index in enumerate(sorted(i for part in gathered for i in part))}
        parts: list[list[Sequence]] = [[] for _ in range(count)]
        for sequence in sorted(sequences, key=lambda s: s.index):
            parts[order[sequence.index] * count // len(order)].append(sequence)
        return parts

    def step(self, sequences: list[Sequence], loss: Loss, aggregation: str, with_entropy_grad: bool) -> Metrics:
        """One optimizer step: accumulate gradients over micro-batches, clip, update; skipped everywhere if not finite."""
        started = time.perf_counter()
        sequences = [s for s in sequences if s.actor_mask and s.response_length]
        tokens, count = self._sum([sum(s.response_length for s in sequences), len(sequences)])
        if not count:
            return {"actor/empty_minibatches": 1.0}
        totals = BatchTotals(int(tokens), int(count))
        batches = microbatches(sequences, self.max_tokens)
        (rounds,) = self._max([len(batches)])
        meter = _Meter(self.device)
        for i in range(int(rounds)):
            batch = batches[i] if i < len(batches) else []
            sync_gradients(self.policy, i == int(rounds) - 1)
            token_batch = self._forward(batch, with_entropy_grad)
            per_token, logged = loss(token_batch)
            weights = [token_weight(aggregation, s.response_length, totals, self.horizon) for s in batch]
            weight = as_tensor(np.repeat(weights, [s.response_length for s in batch]), self.device)
            # FSDP averages over ranks; the weights already count all ranks. A dummy's empty sum keeps its graph alive.
            objective = (per_token * weight).sum() * dist.get_world_size()
            (objective + 0.0 * token_batch.logprobs.sum()).backward()
            meter.add(per_token, weight, logged)
        metrics = meter.means(self, totals) | self._apply(meter.loss(self))
        self._spent("update_actor", started)
        return metrics

    # -- below the primitives ----------------------------------------------------------------------------------------

    def _forward(self, batch: list[Sequence], entropy_grad: bool) -> TokenBatch:
        padded = pad(batch, self.device)
        logprobs, entropy = self.policy(padded.input_ids, padded.position_ids, padded.select, padded.targets, entropy_grad)
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
        logprobs, _ = model(padded.input_ids, padded.position_ids, padded.select, padded.targets, False)
        for sequence, values in zip(batch, split_like(logprobs, batch), strict=True):
            setattr(sequence, column, values)

    def _apply(self, loss: float) -> Metrics:
        """Clip and update, or skip on all ranks alike: the norm is a global quantity, so every rank decides the same."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.clip_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        lr = self.config.lr_at(self.updates)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.nonfinite_in_a_row = 0 if finite else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row >= self.config.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self.nonfinite_in_a_row} optimizer steps in a row had a non-finite loss ({loss}) or gradient ({grad_norm}); "
                "nothing of them was applied: lower optimizer.lr or look at the last sample rollouts."
            )
        return {
            "actor/grad_norm": grad_norm if finite else 0.0,
            "actor/lr": lr,
            "actor/nonfinite_steps": float(not finite),
        }

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
