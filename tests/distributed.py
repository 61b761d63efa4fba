"""Running a function on several gloo ranks and getting what each returned."""

import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

# Ranks are forked from a process that has these: each would import them for eight seconds of a core.
mp.set_forkserver_preload(["tests.learner_parts", "pipelines.trainer.learner", "pipelines.trainer.state", "torch.distributed.fsdp"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` in `world_size` processes with a gloo group; the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, args=(world_size, free_port(), folder, function, arguments), nprocs=world_size, start_method="forkserver"
        )
        return [pickle.loads((Path(folder) / f"{rank}").read_bytes()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_WAIT_POLICY": "PASSIVE"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    result = function(*arguments)
    (Path(folder) / f"{rank}").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
