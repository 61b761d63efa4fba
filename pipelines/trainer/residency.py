"""Keeps on the device only what the trainer is using; idle weights and optimizer states wait in the host's memory."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

HOST = torch.device("cpu")

Part = nn.Module | torch.optim.Optimizer


class Residency:
    """The trainer's models and optimizers by name; `use` says which are needed next. Without `enabled` all of them stay."""

    def __init__(self, device: torch.device, parts: Mapping[str, Part], enabled: bool) -> None:
        self.device, self.parts, self.enabled = device, parts, enabled
        self.resident = set(parts)

    def use(self, *names: str) -> None:
        """Bring these to the device and send all others away."""
        if not self.enabled:
            return
        for name in self.resident - set(names):
            _move(self.parts[name], HOST)
        for name in (set(names) & set(self.parts)) - self.resident:
            _move(self.parts[name], self.device)
        self.resident = set(names) & set(self.parts)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _move(part: Part, device: torch.device) -> None:
    if isinstance(part, nn.Module):
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a gathered copy would stay behind
        part.to(device)
        return
    for state in part.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():  # step counts stay where they are
                state[name] = value.to(device)
