"""Settings of the engines, how they sample, and the environment of their processes."""

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class EngineConfig:
    """How many engines there are and what each of them gets; `conf/cluster/base.yaml` says what each key is."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "count": (1, math.inf),
        "tensor_parallel_size": (1, math.inf),
        "num_cpus": (0, math.inf),
        "num_gpus": (0, math.inf),
        "threads": (1, math.inf),
        "kv_cache_gib": (1e-3, math.inf),
        "gpu_memory_utilization": (1e-3, 1),
        "max_num_seqs": (1, math.inf),
        "max_num_batched_tokens": (1, math.inf),
        "block_size": (1, math.inf),
        "start_timeout_s": (1e-3, 1e7),
        "request_timeout_s": (1e-3, 1e7),
        "sync_timeout_s": (1e-3, 1e7),
        "max_restarts": (0, math.inf),
    }

    count: int
    tensor_parallel_size: int
    num_cpus: float
    num_gpus: float
    threads: int
    kv_cache_gib: float
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    enforce_eager: bool
    start_timeout_s: float
    request_timeout_s: float
    sync_timeout_s: float
    max_restarts: int
    weight_sync: str

    def __post_init__(self) -> None:
        if self.weight_sync not in ("checkpoint", "nccl"):
            raise ValueError(f"cluster.engines.weight_sync={self.weight_sync}: use checkpoint or nccl.")
        if self.weight_sync == "nccl" and not self.num_gpus:
            raise ValueError("cluster.engines.weight_sync=nccl needs engines on GPUs; use checkpoint.")
        if self.weight_sync == "nccl" and self.max_restarts:
            raise ValueError(
                "cluster.engines.weight_sync=nccl: an engine that starts again cannot join the group of the others; set "
                "cluster.engines.max_restarts=0 (the run then ends, and resume= goes on from its newest checkpoint) or use "
                "checkpoint."
            )


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Training refuses top-p and top-k: the trainer could not reproduce their probabilities."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "temperature": (0, 100),
        "top_p": (1e-9, 1),
        "top_k": (-1, math.inf),
    }

    temperature: float
    top_p: float = 1.0
    top_k: int = -1

    def check_for_training(self) -> None:
        """ValueError if log-probabilities of samples would not be those of the policy at its temperature."""
        if self.top_p != 1.0 or self.top_k not in (-1, 0) or self.temperature <= 0:
            raise ValueError(
                f"sampling(temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}): training samples the whole "
                "distribution; use temperature > 0, top_p=1 and top_k=-1 (evaluation may differ)."
            )


def environment(config: EngineConfig) -> dict[str, str]:
    """Environment of an engine actor: in-process and thread-bound on CPUs, where spinning processes starve each other."""
    shared = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if config.num_gpus:
        return shared
    if config.enforce_eager:
        # vLLM compiles two small functions all the same, and the first sample waits for them: 20 s, or 4 s from a warm cache.
        shared["TORCH_COMPILE_DISABLE"] = "1"
    return shared | {
        "OMP_NUM_THREADS": str(config.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
    }
