"""How the trainer's ranks are started, and what each of them runs.

Kept light on purpose: Ray's controller and every rank unpickle this module, and torch and transformers take seconds to import.
"""

from typing import Any

import ray.train

from pipelines.trainer.config import LearnerConfig, LoopConfig
from pipelines.trainer.link import CoordinatorDied

COLLECTIVE_TIMEOUT_S = 1800  # a rank that waits this long for the others gives up


def run_rank(config: LoopConfig) -> None:
    """What `TorchTrainer` runs on each rank.

    Ray Train starts all ranks again after any error. That helps against a rank that died and not against an error in what it was
    told to do: such an error is left with the coordinator, and ranks that find one there end at once.
    """
    try:
        if config.coordinator.ask("fatal_error") is not None:
            return
    except CoordinatorDied:
        return  # the driver, which asks it next, says so
    rollouts = ray.train.get_dataset_shard("rollouts")  # its coordinator starts while this process imports the rest
    from pipelines.trainer.failures import is_collateral, root_cause, trace_of
    from pipelines.trainer.loop import Loop

    try:
        Loop(config, rollouts).run()
    except Exception as error:
        if not is_collateral(error):
            config.coordinator.ask("fail", root_cause(error), trace_of(error))
        raise


def rank_options(learner: LearnerConfig) -> dict[str, Any]:
    """`TorchTrainer` arguments for the ranks of a configuration: gloo on CPUs, nccl on GPUs."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig  # brings torch, which unpickling this module must not

    resources: dict[str, float] = {"CPU": learner.num_cpus}
    if learner.num_gpus:
        resources["GPU"] = learner.num_gpus
    return {
        "torch_config": TorchConfig(backend="nccl" if learner.num_gpus else "gloo", timeout_s=COLLECTIVE_TIMEOUT_S),
        "scaling_config": ScalingConfig(num_workers=learner.ranks, use_gpu=bool(learner.num_gpus), resources_per_worker=resources),
    }
