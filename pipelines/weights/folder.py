"""From the trainer's weights to the engines', behind one call: through a folder of safetensors, or over NCCL between GPUs."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import ray.util
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from pipelines.engines.engine import CURRENT
from pipelines.engines.pool import EngineError, EnginePool
from pipelines.store.checkpoint import write_atomically
from pipelines.trainer.collectives import on_rank_0
from pipelines.trainer.learner import Learner
from pipelines.trainer.policy import full_state_dict, hf_weights
from pipelines.weights.checksum import weights_checksum


class WeightSync(Protocol):
    """Gives engines the trainer's weights; every call is collective and fails on all ranks alike."""

    def push(self, version: int) -> None:
        """Weights, version and prefix-cache reset, confirmed by every engine."""
        ...


def weight_sync(learner: Learner, engines: EnginePool, directory: str) -> WeightSync:
    """The way that `cluster.engines.weight_sync` names."""
    if engines.config.weight_sync == "nccl":
        return NcclSync(learner, engines)
    return CheckpointSync(learner, engines, Path(directory))


class CheckpointSync:
    """Through a folder that trainer and engines both see; works everywhere, and engines that start again find it."""

    def __init__(self, learner: Learner, engines: EnginePool, directory: Path) -> None:
        self._learner, self._engines, self._directory = learner, engines, directory

    def push(self, version: int) -> None:
        """Write, have the engines read, compare checksums."""
        weights = full_state_dict(self._learner.policy, getattr(torch, self._learner.model.dtype))
        on_rank_0(lambda: self._write_and_load(weights, version))

    def _write_and_load(self, weights: dict[str, torch.Tensor], version: int) -> None:
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


class NcclSync:
    """Over vLLM's own weight transfer: rank 0 broadcasts to all workers of all engines. Written, and not yet run on GPUs."""

    def __init__(self, learner: Learner, engines: EnginePool) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self._client = PoolClient(engines)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        info = NCCLTrainerInitInfo(ray.util.get_node_ip_address(), port, self._client.world_size, rank=dist.get_rank())
        source = PolicySource(learner)
        self._transfer = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self._client, source=cast(Any, source))

    def push(self, version: int) -> None:
        """Gather on all ranks, broadcast from rank 0."""
        self._client.version = version
        self._transfer.send_weights()
        dist.barrier()


class PoolClient:
    """The pool as vLLM's trainer side wants to see its engines."""

    def __init__(self, engines: EnginePool) -> None:
        self._engines, self.version = engines, 0
        self._workers = engines.config.tensor_parallel_size

    @property
    def world_size(self) -> int:
        """The sender and every worker of every engine."""
        return 1 + len(self._engines.actors) * self._workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each engine's workers follow those of the one before in the group's ranks."""
        offsets = [init_info["rank_offset"] + i * self._workers for i in range(len(self._engines.actors))]
        self._engines.transfer("init_weight_transfer_engine", [init_info | {"rank_offset": offset} for offset in offsets])

    def start_weight_update(self) -> None:
        """All engines get ready."""
        self._engines.transfer("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """All engines receive."""
        self._engines.transfer("update_weights", [update_info] * len(self._engines.actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All engines take the version."""
        for confirmed in self._engines.finish_transfer(self.version):
            if confirmed != {"version": self.version}:
                raise EngineError(f"weights version {self.version} was confirmed as {confirmed}.")


class PolicySource:
    """The policy's weights as vLLM's trainer side reads them: what will come, and then the tensors."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._dtype = learner, getattr(torch, learner.model.dtype)
        self._metadata: list[Any] = []

    def metadata(self) -> list[Any]:
        """Names, types and shapes, gathered once."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        if not self._metadata:
            self._metadata = [ParamMeta(name, self._dtype, tuple(tensor.shape)) for name, tensor in self]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return hf_weights(self._learner.policy, self._dtype)
