"""How good a policy is: mean@n, bootstrapped best@k and unbiased pass@k over validation problems."""

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
    """mean@n, and best@k and pass@k for k = 2, 4, ... n: of each data source, and the equal mean of sources where all have it.

    They are of how right responses are (`acc`), and the mean reward stands beside them. Names are verl's. Responses that the judge
    could not score are left out and counted.
    """
    rng = np.random.default_rng(seed)
    metrics: dict[str, float] = {}
    shared: dict[str, list[float]] = {}
    sources = 0

    def note(own: str, everywhere: str, values: list[float]) -> None:
        metrics[own] = float(np.mean(values))
        shared.setdefault(everywhere, []).append(metrics[own])

    for source in sorted({row["data_source"] for row in rows}):
        own = [row for row in rows if row["data_source"] == source]
        scores = [np.array([acc for acc in row["acc"] if acc is not None], float) for row in own]
        metrics[f"val-aux/{source}/missing"] = float(n * len(scores) - sum(map(len, scores)))
        scored = [values for values in scores if len(values)]
        if not scored:
            continue
        sources += 1
        note(f"val-core/{source}/acc/mean@{n}", f"val-core/mean/acc/mean@{n}", [float(values.mean()) for values in scored])
        rewards = [[reward for reward in row["reward"] if reward is not None] for row in own]
        metrics[f"val-aux/{source}/reward/mean@{n}"] = float(np.mean([np.mean(one) for one in rewards if one]))
        right_or_wrong = all(np.isin(values, (0.0, 1.0)).all() for values in scored)
        for k in (2**i for i in range(1, n.bit_length()) if 2**i <= n):
            best = [float(rng.choice(values, (bootstrap, k)).max(axis=1).mean()) for values in scored]
            note(f"val-core/{source}/acc/best@{k}/mean", f"val-core/mean/acc/best@{k}/mean", best)
            if right_or_wrong and (enough := [values for values in scored if len(values) >= k]):
                chances = [pass_at(len(values), int(values.sum()), k) for values in enough]
                note(f"val-core/{source}/acc/pass@{k}", f"val-core/mean/acc/pass@{k}", chances)
    return metrics | {name: float(np.mean(values)) for name, values in shared.items() if len(values) == sources}


def pass_at(n: int, right: int, k: int) -> float:
    """The chance that k of n responses, drawn without replacement, hold one of those that are right: `1 - C(n-c, k) / C(n, k)`,
    unbiased for the chance of k fresh ones (Chen et al. 2021, equation 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


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
    """The equal mean of mean@n over data sources: the one number by which checkpoints are ranked; NaN without any."""
    return metrics.get(f"val-core/mean/acc/mean@{n}", float("nan"))
