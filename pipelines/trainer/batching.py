"""Groups of rows into samples, and samples into right-padded micro-batches under a hard cap of tokens."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from algorithms.types import Credit, Sample, further_fields

PADDING_LIMIT = 0.7  # a sequence shorter than this part of its batch's longest is mostly padding there
MAX_GROUP = 1 << 16  # continuations a row may have, for a global order of sequences


def samples_of(row: dict[str, Any], credit_type: type[Credit] = Credit) -> list[Sample]:
    """The continuations of one credited rollout-group row; prompt and prefix are one prompt here, so neither gets loss."""
    prompt = np.concatenate([row["prompt_ids"], row["prefix_ids"]]).astype(np.int64)
    further = further_fields(credit_type)
    samples = []
    for j, (response, logprobs) in enumerate(zip(row["response_ids"], row["rollout_logprobs"], strict=True)):
        if len(response) != len(logprobs):
            raise ValueError(f"row {row['row_id']}: {len(response)} response tokens but {len(logprobs)} log-probabilities.")
        samples.append(
            Sample(
                index=row["row_id"] * MAX_GROUP + j,
                ids=np.concatenate([prompt, np.asarray(response, dtype=np.int64)]),
                prompt_length=len(prompt),
                rollout_logprobs=np.asarray(logprobs, dtype=np.float32),
                advantage=float(row["advantages"][j]),
                actor_mask=bool(row["actor_mask"][j]),
                group=row["row_id"],
                purpose=row["purpose"],
                reward=math.nan if row["reward"][j] is None else float(row["reward"][j]),
                from_prompt=not len(row["prefix_ids"]),
                credit={name: row[name][j] if isinstance(row[name], list) else row[name] for name in further},
            )
        )
    return samples


TOKENS = ("prompt_ids", "prefix_ids", "response_ids", "rollout_logprobs")
LIGHT = ("row_id", "purpose", "reward")


def trainer_rows(table: pa.Table, credit_type: type[Credit] = Credit) -> Iterator[dict[str, Any]]:
    """What the trainer needs of credited rows; their tokens stay arrays, as Python objects those of a long step fill gigabytes."""
    light = table.select([*LIGHT, *(field.name for field in dataclasses.fields(credit_type))]).to_pylist()
    columns = {name: table[name].combine_chunks() for name in TOKENS}
    for i, row in enumerate(light):
        yield row | {name: _arrays(columns[name][i].values) for name in TOKENS}


def _arrays(values: pa.Array) -> Any:
    """A list of numbers as an array, a list of such lists as a list of arrays."""
    if pa.types.is_list(values.type):
        return [one.values.to_numpy(zero_copy_only=False) for one in values]
    return values.to_numpy(zero_copy_only=False)


def microbatches(samples: list[Sample], max_tokens: int) -> list[list[Sample]]:
    """Samples sorted by length and cut so that rows x longest row never exceeds `max_tokens`; ValueError if one alone does.

    A batch that has an eighth of the budget is also closed before much shorter sequences, which would be mostly padding in it.
    """
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: (-len(s.ids), s.index)):
        length = len(sample.ids)
        if length > max_tokens:
            raise ValueError(
                f"a sequence of {length} tokens exceeds cluster.learner.max_tokens_per_microbatch={max_tokens}: "
                "raise it, or lower the prompt and response budgets."
            )
        rows, longest = (len(batches[-1]), len(batches[-1][0].ids)) if batches else (0, 0)
        fits = (rows + 1) * longest <= max_tokens
        wasteful = length < PADDING_LIMIT * longest and rows * longest >= max_tokens // 8
        if batches and fits and not wasteful:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


@dataclass(frozen=True)
class Padded:
    """One micro-batch ready for `Policy.forward`."""

    input_ids: Tensor  # [rows, length]
    position_ids: Tensor  # [rows, length]
    select: Tensor  # [tokens] flat positions whose hidden state predicts a response token
    targets: Tensor  # [tokens]


def pad(samples: list[Sample], device: torch.device) -> Padded:
    """Right-pad a micro-batch; every response token is selected, by the position before it. An empty one becomes a dummy."""
    length = max((len(s.ids) for s in samples), default=2)
    input_ids = np.zeros((max(len(samples), 1), length), dtype=np.int64)
    select: list[np.ndarray] = []
    for i, s in enumerate(samples):
        input_ids[i, : len(s.ids)] = s.ids
        select.append(i * length + np.arange(s.prompt_length - 1, len(s.ids) - 1))
    flat = np.concatenate(select) if samples else np.zeros(0, dtype=np.int64)
    return Padded(
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=torch.arange(length, device=device).expand(input_ids.shape),
        select=torch.from_numpy(flat).to(device),
        targets=torch.from_numpy(input_ids.reshape(-1)[flat + 1]).to(device),
    )


def split_like(values: Tensor, samples: list[Sample]) -> Iterator[np.ndarray]:
    """Cut a [tokens] tensor of a micro-batch back into one float32 array per sample."""
    flat, start = values.detach().float().cpu().numpy(), 0
    for s in samples:
        yield flat[start : start + s.response_length]
        start += s.response_length
