"""Which language model judges, and how it is asked."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class ModelJudgeConfig:
    """One judge behind an OpenAI-compatible endpoint; `conf/task/proofs.yaml` says what each key is."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "concurrency": (1, 100_000),
        "timeout_s": (1e-3, 1e6),
        "retries": (0, 1000),
        "max_tokens": (1, math.inf),
        "temperature": (0, 10),
        "max_response_chars": (1, math.inf),
        "prices": (0, math.inf),
    }

    model: str
    base_url: str
    api_key_env: str | None
    prompt: str
    concurrency: int
    timeout_s: float
    retries: int
    max_tokens: int
    temperature: float
    max_response_chars: int
    prices: tuple[float, float]
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"task.model_judge: base_url={self.base_url} is no address; it begins with http:// or https://.")


@dataclass(frozen=True)
class ModelJudgesConfig:
    """The judge of training responses and that of validation, which may be shown more."""

    train: ModelJudgeConfig
    validation: ModelJudgeConfig
