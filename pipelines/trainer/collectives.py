"""Numbers that all ranks of the trainer must agree on."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def collectively(action: Callable[[], None]) -> None:
    """Do something on every rank; RuntimeError on all of them if it fails on any."""
    failure: str | None = None
    try:
        action()
    except Exception as error:
        failure = str(error) or type(error).__name__
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if found := [one for one in failures if one is not None]:
        raise RuntimeError(found[0])


def on_rank_0(action: Callable[[], None]) -> None:
    """Do something on rank 0 while the others wait; RuntimeError on all ranks if it fails there."""
    collectively(action if dist.get_rank() == 0 else lambda: None)


class Ranks:
    """Small collectives over all ranks of the trainer."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.count = device, dist.get_world_size()

    def total(self, values: list[float]) -> list[float]:
        """Each number summed over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: list[float]) -> list[float]:
        """Each number's maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all ranks, in the order of the ranks."""
        parts: list[Any] = [None] * self.count
        dist.all_gather_object(parts, items)
        return [item for part in parts for item in part]

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()
