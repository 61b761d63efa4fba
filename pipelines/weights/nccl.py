"""Weights over vLLM's own NCCL transfer: rank 0 broadcasts to all workers of all engines. Written, and not yet run on GPUs."""

import socket
from collections.abc import Iterator
from typing import Any, cast

import ray.util
import torch
import torch.distributed as dist

from pipelines.engines.pool import EngineError, EnginePool
from pipelines.weights.base import Weights


class NcclSync:
    """All ranks gather, rank 0 broadcasts."""

    def __init__(self, weights: Weights, engines: EnginePool) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self._client = PoolClient(engines)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        info = NCCLTrainerInitInfo(ray.util.get_node_ip_address(), port, self._client.world_size, rank=dist.get_rank())
        source = Source(weights)
        self._transfer = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self._client, source=cast(Any, source))

    def push(self, version: int) -> None:
        """Gather on all ranks, broadcast from rank 0."""
        self._client.version = version
        self._transfer.send_weights()


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


class Source:
    """The weights as vLLM's trainer side reads them: what will come, and then the tensors."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._metadata: list[Any] = []

    def metadata(self) -> list[Any]:
        """Names, types and shapes, gathered once."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        if not self._metadata:
            self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights)
