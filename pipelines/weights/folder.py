"""Weights through a folder that trainer and engines both see: works everywhere, and engines that start again find them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipelines.engines.engine import CURRENT
from pipelines.engines.pool import EnginePool
from pipelines.store.whole_file import write_atomically
from pipelines.weights.base import Weights, on_rank_0_cpu
from pipelines.weights.checksum import weights_checksum


class FolderSync:
    """Rank 0 writes safetensors, the engines read them, and checksums are compared."""

    def __init__(self, weights: Weights, engines: EnginePool, directory: Path) -> None:
        self._weights, self._engines, self._directory = weights, engines, directory

    def push(self, version: int) -> None:
        """Write, have the engines read, compare checksums."""
        weights = on_rank_0_cpu(self._weights)
        if not weights:
            return
        current = write_current(self._directory, weights, version)
        self._engines.load_weights(**current)
        for old in self._directory.glob("version_*"):
            if str(old) != current["path"]:
                shutil.rmtree(old)


def write_current(directory: Path, weights: dict[str, torch.Tensor], version: int) -> dict[str, Any]:
    """Write weights into a folder and name them the current ones; what `EnginePool.load_weights` takes."""
    target = directory / f"version_{version:06d}"
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    current = {"path": str(target), "version": version, "checksum": weights_checksum(weights.values())}
    write_atomically(directory / CURRENT, json.dumps(current))
    return current
