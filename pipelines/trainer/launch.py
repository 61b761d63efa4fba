"""How Ray Train starts the trainer's ranks, for every command that has a trainer."""

from typing import Any

from ray.train import ScalingConfig
from ray.train.torch import TorchConfig

from pipelines.trainer.config import LearnerConfig

COLLECTIVE_TIMEOUT_S = 1800  # a rank that waits this long for the others gives up


def rank_options(learner: LearnerConfig) -> dict[str, Any]:
    """`TorchTrainer` arguments for the ranks of a configuration: gloo on CPUs, nccl on GPUs."""
    resources: dict[str, float] = {"CPU": learner.num_cpus}
    if learner.num_gpus:
        resources["GPU"] = learner.num_gpus
    return {
        "torch_config": TorchConfig(backend="nccl" if learner.num_gpus else "gloo", timeout_s=COLLECTIVE_TIMEOUT_S),
        "scaling_config": ScalingConfig(num_workers=learner.ranks, use_gpu=bool(learner.num_gpus), resources_per_worker=resources),
    }
