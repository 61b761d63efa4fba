"""What a way of giving engines the trainer's weights must do."""

from collections.abc import Iterable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

Weights = Iterable[tuple[str, Tensor]]  # under their Hugging Face names; a pass over it gathers them anew and is collective


class WeightSync(Protocol):
    """Gives engines the trainer's weights. All ranks call it; each reports its own failure."""

    def push(self, version: int) -> None:
        """Weights, version and prefix-cache reset, confirmed by every engine."""
        ...


def on_rank_0_cpu(weights: Weights) -> dict[str, Tensor]:
    """The weights on the CPU of rank 0 (empty on other ranks), gathered one at a time; collective."""
    keep = dist.get_rank() == 0
    return {name: value.cpu().contiguous() for name, value in weights if keep}
