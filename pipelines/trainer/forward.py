"""From a micro-batch of samples to what a loss reads: a model's forward, and the samples' own numbers beside it."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from algorithms.types import Sample, StateBatch, TokenBatch
from pipelines.trainer.batching import pad, split_like
from pipelines.trainer.optimizer import column
from pipelines.trainer.policy import Policy
from pipelines.trainer.value_model import ValueModel


def token_batch(policy: Policy, batch: list[Sample], device: torch.device, temperature: float, entropy_grad: bool) -> TokenBatch:
    """A micro-batch's response tokens under the policy.

    Log-probabilities that were not stored are the current ones: of the policy before any update, and of a reference that no loss
    reads.
    """
    padded = pad(batch, device)
    logprobs, entropy = policy(padded.input_ids, padded.position_ids, padded.select, padded.targets, temperature, entropy_grad)

    def stored(values: list[np.ndarray | None]) -> Tensor:
        present = [value for value in values if value is not None]
        return column(present, device) if present and len(present) == len(batch) else logprobs.detach()

    return TokenBatch(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=stored([s.old_logprobs for s in batch]),
        rollout_logprobs=column([s.rollout_logprobs for s in batch], device),
        ref_logprobs=stored([s.ref_logprobs for s in batch]),
        advantages=_spread([s.advantage for s in batch], batch, device),
        rewards=_spread([s.reward for s in batch], batch, device),
        sequence=_sequence(batch, device),
        columns=_columns(batch, device),
    )


def state_batch(model: ValueModel, batch: list[Sample], device: torch.device) -> StateBatch:
    """A micro-batch's response states under the value model."""
    padded = pad(batch, device)
    return StateBatch(
        outputs=model(padded.input_ids, padded.position_ids, padded.select),
        old_values=column([s.values for s in batch if s.values is not None], device),
        sequence=_sequence(batch, device),
        columns=_columns(batch, device),
    )


def store(name: str, values: Tensor, batch: list[Sample]) -> None:
    """Leave a micro-batch's numbers with its samples."""
    for sample, own in zip(batch, split_like(values, batch), strict=True):
        setattr(sample, name, own)


def _sequence(batch: list[Sample], device: torch.device) -> Tensor:
    lengths = torch.tensor([s.response_length for s in batch], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(batch)), lengths).to(device)


def _columns(batch: list[Sample], device: torch.device) -> Mapping[str, Tensor]:
    """The samples' own columns. A batch without samples has an empty one of every name, so that any loss can be asked of it."""
    if not batch:
        return defaultdict(lambda: torch.zeros(0, device=device))
    return {name: _spread([s.columns[name] for s in batch], batch, device) for name in batch[0].columns}


def _spread(values: list[float | np.ndarray], batch: list[Sample], device: torch.device) -> Tensor:
    """A number for each sample, or one for each of its tokens, at every token."""
    return column([np.broadcast_to(value, s.response_length) for value, s in zip(values, batch, strict=True)], device)
