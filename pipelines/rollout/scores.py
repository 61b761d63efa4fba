"""How good a policy is: mean@n and bootstrapped best@k over validation problems."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation during training; `conf/config.yaml` says what each key is."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "every": (0, math.inf),
        "n": (1, 1 << 16),
        "temperature": (0, 100),
        "top_p": (1e-9, 1),
        "top_k": (-1, math.inf),
    }

    every: int
    at_start: bool
    n: int
    temperature: float
    top_p: float
    top_k: int


def evaluation_metrics(rows: list[dict[str, Any]], n: int, bootstrap: int = 1000, seed: int = 0) -> dict[str, float]:
    """Per data source `val-core/<source>/acc/mean@n` and `best@k/mean` for k = 2, 4, ... n, by bootstrap over each problem's
    responses (verl's names). Responses the judge could not score are left out and counted."""
    rng = np.random.default_rng(seed)
    metrics: dict[str, float] = {}
    for source in sorted({row["data_source"] for row in rows}):
        scores = [np.array([r for r in row["reward"] if r is not None], float) for row in rows if row["data_source"] == source]
        missing = sum(row["n"] for row in rows if row["data_source"] == source) - sum(map(len, scores))
        scored = [values for values in scores if len(values)]
        metrics[f"val-aux/{source}/missing"] = float(missing)
        if not scored:
            continue
        metrics[f"val-core/{source}/acc/mean@{n}"] = float(np.mean([values.mean() for values in scored]))
        k = 2
        while k <= n:
            best = [rng.choice(values, (bootstrap, k)).max(axis=1).mean() for values in scored]
            metrics[f"val-core/{source}/acc/best@{k}/mean"] = float(np.mean(best))
            k *= 2
    return metrics


def check_missing(step: int, rows: list[dict[str, Any]], fraction: float, most: float) -> None:
    """RuntimeError with the first reason if more than `most` of a step's responses have no reward."""
    if fraction <= most:
        return
    reason = next(s for row in rows for s, r in zip(row["reward_status"], row["reward"], strict=True) if r is None)
    raise RuntimeError(
        f"step {step}: {fraction:.0%} of the responses got no reward, more than max_missing_reward={most:.0%}; "
        f"the first says: {reason}"
    )


def check_scored(rows: list[dict[str, Any]]) -> None:
    """RuntimeError with the first reason if no response of an evaluation has a score."""
    if rows and not any(reward is not None for row in rows for reward in row["reward"]):
        raise RuntimeError(f"evaluation: the judge scored none of the responses; the first says: {rows[0]['reward_status'][0]}")


def mean_score(metrics: dict[str, float], n: int) -> float:
    """The mean@n over data sources: the one number by which checkpoints are ranked; NaN without any."""
    means = [value for name, value in metrics.items() if name.endswith(f"/mean@{n}")]
    return float(np.mean(means)) if means else float("nan")
