"""The ways of giving engines the trainer's weights, by the name that `cluster.engines.weight_sync` has for each."""

from pathlib import Path

from pipelines.engines.pool import EnginePool
from pipelines.weights.base import Weights, WeightSync
from pipelines.weights.folder import FolderSync
from pipelines.weights.nccl import NcclSync


def weight_sync(weights: Weights, engines: EnginePool, directory: str) -> WeightSync:
    """The way that the engines' configuration names; `directory` is where a folder's weights go."""
    if engines.config.weight_sync == "nccl":
        return NcclSync(weights, engines)
    return FolderSync(weights, engines, Path(directory))
