"""Connecting to Ray, and comparing what a run asks for with what the cluster has before anything starts."""

import logging
import os
import socket
from pathlib import Path
from typing import Any

import ray

from pipelines.config.run import RayConfig, RunConfig

COORDINATOR_CPUS = 0.1


class ClusterError(RuntimeError):
    """The cluster cannot hold the run."""


def connect(config: RayConfig, http_port: int | None = None) -> None:
    """Join the cluster named by the configuration or RAY_ADDRESS, or start one here; a driver that is connected stays so.

    Where one is started, the port of the judge that will run there must be free; one that is joined may have its judge on it.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.address is None and "RAY_ADDRESS" not in os.environ:
        if http_port is not None and not ray.is_initialized():
            check_port(http_port)
        # The workers of a cluster started here inherit this environment. Ray would start a worker per CPU at once; on a machine
        # with fewer cores than logical CPUs their imports delay the ones that are needed.
        root = str(Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        os.environ |= {"RAY_prestart_worker_first_driver": "0", "TOKENIZERS_PARALLELISM": "false"}
        os.environ |= {"RAY_worker_maximum_startup_concurrency": "8"}  # at a small machine's default Ray warns of every run
        # Serve kills an HTTP proxy that is not up after five seconds, and the run with it; beside starting engines it takes longer.
        os.environ |= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120"}
        options["num_cpus"] = config.num_cpus
        options["include_dashboard"] = False
        if config.object_store_gib is not None:
            options["object_store_memory"] = int(config.object_store_gib * 2**30)
    else:
        options["address"] = config.address
    if not ray.is_initialized():
        ray.init(**options)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.enable_operator_progress_bars = False
    context.raise_original_map_exception = True  # or a stage's error would be "UDF failed to process a data block."
    # With reservations a pass launches one task and asks what it may use; the answer is read a second later, in every step.
    context.op_resource_reservation_enabled = False


def check_port(port: int) -> None:
    """ClusterError if another program on this machine has a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise ClusterError(f"cluster.judge.http_port={port}: another program has this port; give another.") from None


def demand(config: RunConfig) -> dict[str, tuple[float, float]]:
    """CPUs and GPUs by part."""
    from pipelines.rollout.dataset import STAGE_CPUS

    engines, learner, judge = config.engines, config.learner, config.judge
    return {
        f"{engines.count} engines": (
            engines.count * engines.num_cpus,
            engines.count * engines.num_gpus * engines.tensor_parallel_size,
        ),
        f"{learner.ranks} trainer ranks": (learner.ranks * learner.num_cpus, learner.ranks * learner.num_gpus),
        f"{judge.min_replicas} judge replicas": (judge.min_replicas * judge.num_cpus, 0.0),
        f"{config.blocks} rollout blocks": (config.blocks * STAGE_CPUS, 0.0),
        "coordinator": (COORDINATOR_CPUS, 0.0),
    }


def check_demand(parts: dict[str, tuple[float, float]]) -> None:
    """ClusterError with a table if the cluster has too few CPUs or GPUs; waiting for them would never end."""
    have = ray.cluster_resources()
    cpus, gpus = sum(c for c, _ in parts.values()), sum(g for _, g in parts.values())
    if cpus <= have.get("CPU", 0) and gpus <= have.get("GPU", 0):
        return
    lines = [("", "CPUs", "GPUs"), *((name, f"{c:.2f}", f"{g:.2f}") for name, (c, g) in parts.items())]
    lines += [
        ("asked for", f"{cpus:.2f}", f"{gpus:.2f}"),
        ("in the cluster", f"{have.get('CPU', 0):.2f}", f"{have.get('GPU', 0):.2f}"),
    ]
    table = "\n".join(f"  {name:<22}{c:>8}{g:>8}" for name, c, g in lines)
    raise ClusterError(f"the cluster is too small for this run; lower the demand under `cluster` or add nodes:\n{table}")
