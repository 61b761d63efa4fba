"""Settings of the trainer's parts.

Kept light on purpose: Ray's controller and every rank unpickle this module, and torch and transformers take seconds to import.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from algorithms.base import Algorithm
from pipelines.engines.pool import EnginePool
from pipelines.store.checkpoint import CheckpointConfig
from pipelines.trainer.link import CoordinatorLink


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters: they alone are trained; engines and checkpoints get weights with them merged in."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "rank": (1, math.inf),
        "alpha": (1e-9, math.inf),
    }

    rank: int
    alpha: float
    target_modules: str | list[str]


@dataclass(frozen=True)
class ModelConfig:
    """Which model to train and in what precision; `conf/model/base.yaml` says what each key is."""

    path: str
    dtype: str
    gradient_checkpointing: bool
    lora: LoRAConfig | None = None
    self_critic_prompt: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"model.dtype={self.dtype}: use float32 or bfloat16.")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, a linear warm-up, then a constant rate or a cosine to a tenth over `total_updates`."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "lr": (0, 1),
        "betas": (0, 0.999999999),
        "eps": (0, 1),
        "weight_decay": (0, math.inf),
        "warmup_steps": (0, math.inf),
        "clip_grad_norm": (1e-12, math.inf),
        "max_nonfinite_steps": (1, math.inf),
        "total_updates": (1, math.inf),
    }

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    schedule: str
    warmup_steps: int
    warmup_by: str
    clip_grad_norm: float
    max_nonfinite_steps: int
    total_updates: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"optimizer.schedule={self.schedule}: use constant or cosine.")
        if self.warmup_by not in ("optimizer_step", "rollout_batch"):
            raise ValueError(f"optimizer.warmup_by={self.warmup_by}: use optimizer_step or rollout_batch.")
        if self.schedule == "cosine" and not self.total_updates:
            raise ValueError("optimizer.schedule=cosine needs optimizer.total_updates.")

    def lr_at(self, update: int, warmed: int) -> float:
        """The learning rate of the update with this number, after so many units of warm-up, both counted from 0."""
        lr = self.lr * min(1.0, (warmed + 1) / max(self.warmup_steps, 1))
        if self.schedule == "cosine" and self.total_updates:
            lr *= 0.1 + 0.45 * (1 + math.cos(math.pi * min(update / self.total_updates, 1.0)))
        return lr


@dataclass(frozen=True)
class LearnerConfig:
    """The trainer's ranks and what each may hold; `conf/cluster/base.yaml` says what each key is."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "ranks": (1, math.inf),
        "num_cpus": (0, math.inf),
        "num_gpus": (0, math.inf),
        "threads": (1, math.inf),
        "max_tokens_per_microbatch": (1, math.inf),
        "stream_timeout_s": (1e-3, 1e7),
        "max_restarts": (0, math.inf),
    }

    ranks: int
    num_cpus: float
    num_gpus: float
    threads: int
    max_tokens_per_microbatch: int
    stream_timeout_s: float
    max_restarts: int
    offload_idle: bool


@dataclass(frozen=True)
class LoopConfig:
    """Everything a rank needs; sent to each by Ray Train."""

    algorithm: Algorithm
    model: ModelConfig
    optimizer: OptimizerConfig
    learner: LearnerConfig
    checkpoint: CheckpointConfig
    coordinator: CoordinatorLink
    engines: EnginePool
    steps: int
    temperature: float
    output_dir: str
    manifest: dict[str, Any]  # fingerprints that a resumed run must share
    resume_from: str | None
    evaluate_every: int
    evaluate_at_start: bool
    profiled_step: int | None = None

    @property
    def weights_dir(self) -> str:
        return f"{self.output_dir}/weights"
