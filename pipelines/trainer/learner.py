"""The trainer's primitives: named models, named optimizers, and one `step`, the same on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from algorithms.losses import BatchTotals, token_weight
from algorithms.types import (
    Credit,
    Metrics,
    OptimizerSpec,
    Recalled,
    Sample,
    StateBatch,
    StateLoss,
    Step,
    TokenBatch,
    TokenLoss,
    ValueModelSpec,
)
from pipelines.trainer.batching import microbatches, samples_of
from pipelines.trainer.collectives import Ranks
from pipelines.trainer.config import ModelConfig, OptimizerConfig
from pipelines.trainer.forward import state_batch, store, token_batch
from pipelines.trainer.optimizer import Meter, Optimizer, accumulate, column
from pipelines.trainer.policy import Policy, load_policy
from pipelines.trainer.residency import Part, Residency
from pipelines.trainer.stream import in_background
from pipelines.trainer.value_model import ValueModel, load_value_model

# The metric of the seconds that each model's forwards take.
FORWARD_TIMINGS = {"policy": "timing_s/old_log_prob", "reference": "timing_s/ref", "value": "timing_s/values"}


class MemoryLink(Protocol):
    """The way from a rank to the algorithm's memory."""

    def recall(self) -> Recalled:
        """This rank's share of what the memory has for the step's update; collective."""
        ...

    def remember(self, values: Metrics) -> None:
        """Leave values there; collective."""
        ...


class Learner:
    """Implements `algorithms.interface.Learner` on this rank's shard of the models."""

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
        value_model: ValueModelSpec | None = None,
        optimizers: Mapping[str, OptimizerSpec] | None = None,
        credit_type: type[Credit] = Credit,
        memory: MemoryLink | None = None,
        offload_idle: bool = False,
    ) -> None:
        self.config, self.model, self.device, self.memory = optimizer, model, device, memory
        self.temperature, self.horizon, self.max_tokens = temperature, horizon, max_tokens
        self.stream_timeout_s, self.credit_type = stream_timeout_s, credit_type
        self.ranks = Ranks(device)
        mesh: DeviceMesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.policy = load_policy(model, mesh, device)
        self.models: dict[str, Policy | ValueModel] = {"policy": self.policy}
        if reference_path is not None:
            frozen = ModelConfig(reference_path, model.dtype, gradient_checkpointing=False)
            self.models["reference"] = load_policy(frozen, mesh, device).eval().requires_grad_(False)
        self.value_model = value_model
        if value_model is not None:
            begins_as = ModelConfig(value_model.path or model.path, model.dtype, model.gradient_checkpointing)
            self.models["value"] = load_value_model(begins_as, value_model, mesh, device)
        o = optimizer
        actor = OptimizerSpec("policy", "timing_s/update_actor", o.betas, o.eps, o.weight_decay, o.clip_grad_norm)
        self.specs = {"actor": actor, **(optimizers or {})}
        self.optimizers = {
            name: Optimizer(self.models[spec.model], spec, optimizer.max_nonfinite_steps) for name, spec in self.specs.items()
        }
        parts: dict[str, Part] = {**self.models, **{name: one.adamw for name, one in self.optimizers.items()}}
        self.residency = Residency(device, parts, offload_idle)
        self.batches = 0
        self.updates = dict.fromkeys(self.specs, 0)
        self.stepped = dict.fromkeys(self.specs, 0)  # batches in which an optimizer took a step, this one too
        self._last_stepped = dict.fromkeys(self.specs, -1)
        self.timings: Metrics = {}  # seconds by metric, for the loop to read and clear

    # -- the primitives ----------------------------------------------------------------------------------------------

    def receive(self, groups: Iterable[dict[str, Any]], forwards: Mapping[str, Callable[[Sample], bool]]) -> list[Sample]:
        """Collect this rank's samples, running the models asked for on those that are here while others still generate.

        Forwards are collective, so ranks go in lockstep: each round every rank brings a full micro-batch, or what it has at its
        stream's end, or nothing.
        """
        self.batches += 1
        self.residency.use(*self.models)
        samples: list[Sample] = []
        stream = in_background(groups, self.stream_timeout_s)
        exhausted = False
        while True:
            waiting: list[Sample] = []
            while not exhausted and _padded_tokens(waiting) < self.max_tokens:
                row = next(stream, None)
                if row is None:
                    exhausted = True
                    break
                waiting += samples_of(row, self.credit_type)
            samples += waiting
            for name, picks in forwards.items():
                self._forward_all(name, [sample for sample in waiting if picks(sample)])
            (unfinished,) = self.ranks.largest([float(not exhausted)])
            if not unfinished:
                return samples

    def minibatches(self, samples: list[Sample], count: int, balanced: bool = False) -> list[list[Sample]]:
        """Split the step's samples, over all ranks, into `count` parts of equal size, give or take one.

        The step's order is cut, or with `balanced` the order of length is dealt out, forth and back. Rollouts that only refill the
        replay buffer are in none.
        """
        samples = [s for s in samples if s.purpose != "refill"]
        every = self.ranks.gather([(-s.response_length if balanced else 0, s.index) for s in samples])
        order = {index: place for place, (_, index) in enumerate(sorted(every))}
        parts: list[list[Sample]] = [[] for _ in range(count)]
        for sample in sorted(samples, key=lambda s: s.index):
            place = order[sample.index]
            parts[dealt(place, count) if balanced else place * count // len(order)].append(sample)
        return parts

    def step(
        self,
        optimizer: str,
        samples: list[Sample],
        loss: TokenLoss | StateLoss,
        *,
        aggregation: str = "token-mean",
        lr: float | None = None,
        temperature: float | None = None,
        weightless_tokens: int = 0,
        entropy_grad: bool = False,
        measure_change: bool = False,
    ) -> Step:
        """Accumulate gradients over micro-batches, clip, update; skipped on all ranks if not finite."""
        started, spec = time.perf_counter(), self.specs[optimizer]
        samples = [s for s in samples if s.response_length]
        tokens, count, weightless = self.ranks.total([sum(s.response_length for s in samples), len(samples), weightless_tokens])
        if not count:
            return Step(0)
        self.residency.use(spec.model, optimizer)
        totals, meter, module = BatchTotals(int(tokens + weightless), int(count)), Meter(self.ranks), self.models[spec.model]

        def objective(batch: list[Sample]) -> Tensor:
            made, anchor = self._batch(module, batch, temperature or self.temperature, entropy_grad)
            per_token, logged = cast(Callable[..., Any], loss)(made)
            weights = [token_weight(aggregation, s.response_length, totals, self.horizon) for s in batch]
            weight = column([np.repeat(w, s.response_length) for w, s in zip(weights, batch, strict=True)], self.device)
            meter.add(per_token, weight, logged)
            return (per_token * weight).sum() + 0.0 * anchor.sum()  # an empty batch keeps its graph

        accumulate(module, samples, self.max_tokens, self.ranks, objective)
        lr = self.config.lr_at(self.updates[optimizer], self.warmed(optimizer)) if lr is None else lr
        whole_loss = meter.loss()
        applied = self.optimizers[optimizer].apply(lr, whole_loss, measure_change)
        if not applied.skipped:
            self.updates[optimizer] += 1
            self.stepped[optimizer] += int(self._last_stepped[optimizer] < self.batches)
            self._last_stepped[optimizer] = self.batches
        self._spent(spec.timing, started)
        means = meter.means(int(tokens))
        return Step(int(tokens), whole_loss, applied.grad_norm, lr, applied.skipped, applied.change, means)

    def warmed(self, optimizer: str) -> int:
        """How far the warm-up of an optimizer's rate has come, in the unit that the configuration counts it by."""
        if self.config.warmup_by == "optimizer_step":
            return self.updates[optimizer]
        return self.stepped[optimizer] - int(self._last_stepped[optimizer] == self.batches)

    def total(self, values: list[float]) -> list[float]:
        """Each number summed over all ranks."""
        return self.ranks.total(values)

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all ranks, the same list on each."""
        return self.ranks.gather(items)

    def recall(self) -> Recalled:
        """What the algorithm's memory has for this update, once all groups of the step are in."""
        assert self.memory is not None
        return self.memory.recall()

    def remember(self, values: Metrics) -> None:
        """Leave values with the algorithm's memory, for the next steps."""
        assert self.memory is not None
        self.memory.remember(values)

    def use_all(self) -> None:
        """Have every part on the device, for what reads them all: weight sync and checkpoints."""
        self.residency.use(*self.residency.parts)

    # -- below the primitives ----------------------------------------------------------------------------------------

    def _batch(
        self, module: Policy | ValueModel, batch: list[Sample], temperature: float, entropy_grad: bool
    ) -> tuple[TokenBatch | StateBatch, Tensor]:
        """What a loss reads, and the model's output in it that carries the gradient."""
        if isinstance(module, Policy):
            tokens = token_batch(module, batch, self.device, temperature, entropy_grad)
            return tokens, tokens.logprobs
        states = state_batch(module, batch, self.device)
        return states, states.outputs

    @torch.no_grad()
    def _forward_all(self, name: str, samples: list[Sample]) -> None:
        """A model's forward of every micro-batch, its numbers left with the samples; ranks that have fewer bring empty ones."""
        started, module = time.perf_counter(), self.models[name]
        batches = microbatches(samples, self.max_tokens)
        (rounds,) = self.ranks.largest([len(batches)])
        for i in range(int(rounds)):
            batch = batches[i] if i < len(batches) else []
            made, output = self._batch(module, batch, self.temperature, entropy_grad=False)
            if isinstance(made, StateBatch):
                assert self.value_model is not None
                store("values", self.value_model.head.values(output), batch)
            elif name == "reference":
                store("ref_logprobs", output, batch)
            else:
                store("old_logprobs", output, batch)
                store("entropy", made.entropy, batch)
        self._spent(FORWARD_TIMINGS[name], started)

    def _spent(self, timing: str, started: float) -> None:
        self.timings[timing] = self.timings.get(timing, 0.0) + time.perf_counter() - started


def dealt(place: int, count: int) -> int:
    """Which of `count` hands the card at a place goes to: 0 1 2 2 1 0 0 1 2 ..."""
    turn, seat = divmod(place, count)
    return count - 1 - seat if turn % 2 else seat


def _padded_tokens(samples: list[Sample]) -> int:
    return len(samples) * max((len(s.ids) for s in samples), default=0)
