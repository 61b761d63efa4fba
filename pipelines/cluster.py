"""Connecting to Ray, and comparing what a run asks for with what the cluster has before anything starts."""

import logging
from pathlib import Path

import ray

from pipelines.config import RunConfig

COORDINATOR_CPUS = 0.1


class ClusterError(RuntimeError):
    """The cluster cannot hold the run."""


def connect(config: RunConfig) -> None:
    """Join the cluster named by the configuration or RAY_ADDRESS, or start one here."""
    root = str(Path(__file__).parent.parent)
    options: dict[str, object] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": {"PYTHONPATH": root, "RAY_TRAIN_V2_ENABLED": "1", "TOKENIZERS_PARALLELISM": "false"}},
    }
    import os

    if config.ray.address is None and "RAY_ADDRESS" not in os.environ:
        options["num_cpus"] = config.ray.num_cpus
        options["include_dashboard"] = False
        if config.ray.object_store_gib is not None:
            options["object_store_memory"] = int(config.ray.object_store_gib * 2**30)
    else:
        options["address"] = config.ray.address
    ray.init(**options)
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.DataContext.get_current().enable_operator_progress_bars = False


def demand(config: RunConfig) -> dict[str, tuple[float, float]]:
    """CPUs and GPUs by part."""
    from pipelines.rollout import STAGE_CPUS

    engines, learner, judge = config.engines, config.learner, config.judge
    return {
        f"{engines.count} engines": (engines.count * engines.num_cpus, engines.count * engines.num_gpus * engines.tensor_parallel_size),
        f"{learner.ranks} trainer ranks": (learner.ranks * learner.num_cpus, learner.ranks * learner.num_gpus),
        f"{judge.min_replicas} judge replicas": (judge.min_replicas * judge.num_cpus, 0.0),
        f"{config.blocks} rollout blocks": (config.blocks * STAGE_CPUS, 0.0),
        "coordinator": (COORDINATOR_CPUS, 0.0),
    }


def check_fits(config: RunConfig) -> None:
    """ClusterError with a table if the cluster has too few CPUs or GPUs; waiting for them would never end."""
    parts, have = demand(config), ray.cluster_resources()
    cpus, gpus = sum(c for c, _ in parts.values()), sum(g for _, g in parts.values())
    if cpus <= have.get("CPU", 0) and gpus <= have.get("GPU", 0):
        return
    lines = [f"  {name:<22}{c:>8.2f}{g:>8.2f}" for name, (c, g) in parts.items()]
    table = "\n".join(
        [f"  {'':<22}{'CPUs':>8}{'GPUs':>8}", *lines, f"  {'asked for':<22}{cpus:>8.2f}{gpus:>8.2f}"]
        + [f"  {'in the cluster':<22}{have.get('CPU', 0):>8.2f}{have.get('GPU', 0):>8.2f}"]
    )
    raise ClusterError(f"the cluster is too small for this run; lower the demand under `cluster` or add nodes:\n{table}")
