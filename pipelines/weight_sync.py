"""From the trainer's weights to the engines', behind one function; the first backend goes through a folder of safetensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from pipelines.checkpoint import write_atomically
from pipelines.checksum import weights_checksum
from pipelines.engine import CURRENT
from pipelines.engine_pool import EnginePool
from pipelines.learner import Learner
from pipelines.model import full_state_dict


def sync_weights(learner: Learner, engines: EnginePool, version: int, directory: str, dtype: str) -> None:
    """Give the engines the trainer's weights as `version`, confirmed by checksum; collective, and fails on all ranks alike."""
    weights = full_state_dict(learner.policy, getattr(torch, dtype))
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            _through_folder(weights, engines, version, Path(directory))
        except Exception as error:
            failure = [str(error)]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"weight sync failed: {failure[0]}")


def _through_folder(weights: dict[str, torch.Tensor], engines: EnginePool, version: int, directory: Path) -> None:
    target = directory / f"version_{version:06d}"
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    current: dict[str, Any] = {"path": str(target), "version": version, "checksum": weights_checksum(weights.values())}
    write_atomically(directory / CURRENT, json.dumps(current))
    engines.load_weights(**current)
    for old in directory.glob("version_*"):
        if old != target:
            shutil.rmtree(old)
