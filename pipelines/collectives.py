"""Numbers that all ranks of the trainer must agree on."""

from typing import Any

import torch
import torch.distributed as dist


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
