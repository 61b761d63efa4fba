"""Which errors are only the echo of another process's end."""

import subprocess
import sys

import ray
import torch.distributed as dist

from pipelines.trainer.failures import is_collateral
from pipelines.trainer.link import CoordinatorDied
from tests.distributed import free_port

PEER_DIES = """
import os, sys, torch
import torch.distributed as dist
from pipelines.trainer.failures import is_collateral

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
dist.barrier()
if rank:
    os._exit(0)
found = []
for collective in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.all_gather_object([None, None], 1)):
    try:
        collective()
        found.append(False)
    except Exception as error:
        found.append(is_collateral(error))
os._exit(0 if all(found) else 1)
"""


def test_a_collective_that_loses_its_peer_is_an_echo():
    command = [sys.executable, "-c", PEER_DIES]
    port = str(free_port())
    other = subprocess.Popen([*command, "1", port])
    assert subprocess.run([*command, "0", port], timeout=120).returncode == 0
    other.wait(timeout=60)


def test_errors_are_told_by_type_and_not_by_their_words():
    assert is_collateral(ray.exceptions.ActorDiedError())
    assert is_collateral(dist.DistBackendError("x"))
    for error in (RuntimeError("gloo"), ValueError("[gloo] connection closed by peer"), CoordinatorDied("gloo")):
        assert not is_collateral(error)
