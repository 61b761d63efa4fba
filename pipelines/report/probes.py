"""Groups that `pipelines.replay` made, and the tables of how good their critic is: AC2's section 4.4 and Appendix A.4."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from algorithms.ac2_memory import rank_correlation
from pipelines.report.runs import ReportError
from pipelines.store.groups import SETTINGS, files_of


@dataclass(frozen=True)
class Probe:
    """One group: `r` its terminal rewards, `v` its endpoint values (the critic's after a chunk where `probed`, else the reward)."""

    value: float | None  # V(s), with the reference where there is one
    plain: float | None  # V(s) without it
    informed: float | None  # V(s) with it
    r: np.ndarray
    v: np.ndarray
    probed: np.ndarray  # bool

    @property
    def f(self) -> float:
        """The part of the continuations whose value is the critic's."""
        return float(self.probed.mean())


@dataclass(frozen=True)
class GroupFolder:
    """What one job of `pipelines.replay` made of one checkpoint."""

    name: str
    mode: str  # continue | probe
    step: int  # the checkpoint's; 0 for a model folder that no run made
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, path: str) -> "GroupFolder":
        """All groups in a folder; ReportError where there are none."""
        folder = Path(path)
        files = files_of(folder)
        if not files:
            raise ReportError(f"{path}: no groups there; make them with python -m pipelines.replay.")
        settings = json.loads((folder / SETTINGS).read_text())
        return cls(
            folder.name, settings["mode"], settings["step"], [row for file in files for row in pq.read_table(file).to_pylist()]
        )


def probes(rows: Sequence[dict[str, Any]]) -> tuple[list[Probe], dict[str, int]]:
    """Groups of `pipelines.replay` as probes, without continuations that have no reward or no value, and how many those were."""
    found, left_out = [], {"without a reward": 0, "without a value": 0}
    for row in rows:
        informed = row["reference_ids"] is not None
        answers = row["probe_value_with_reference" if informed else "probe_value"]
        r = np.array([np.nan if reward is None else reward for reward in row["reward"]], float)
        probed = np.array(row["probed"])
        v = np.where(probed, [np.nan if answer is None else answer for answer in answers], r)
        left_out["without a reward"] += int(np.isnan(r).sum())
        left_out["without a value"] += int((np.isnan(v) & ~np.isnan(r)).sum())
        kept = ~np.isnan(r) & ~np.isnan(v)
        if kept.any():
            value = row["value_with_reference"] if informed else row["value"]
            found.append(Probe(value, row["value"], row["value_with_reference"], r[kept], v[kept].round(6), probed[kept]))
    return found, left_out


def by_f(groups: Sequence[Probe]) -> list[list[Any]]:
    """Table 1: the error of the group-mean value by f; label, groups, MAE, signed bias."""
    kinds: dict[str, Callable[[Probe], bool]] = {
        "all": lambda g: True,
        "f = 0": lambda g: g.f == 0,
        "0 < f < 1": lambda g: 0 < g.f < 1,
        "f = 1": lambda g: g.f == 1,
    }
    rows = []
    for label, wanted in kinds.items():
        errors = np.array([g.v.mean() - g.r.mean() for g in groups if wanted(g)])
        rows.append([label, len(errors), *((float(np.abs(errors).mean()), float(errors.mean())) if len(errors) else (None, None))])
    return rows


def sample_counts(groups: Sequence[Probe]) -> list[list[Any]]:
    """Table 2: group, centred and individual errors; label, count, MAE, and for the centred ones Pearson's r."""
    pairs = [(g.v[g.probed].mean(), g.r[g.probed].mean()) for g in groups if g.probed.sum() >= 2]
    advantages = centred(groups)
    individual = np.concatenate([(g.v - g.r)[g.probed] for g in groups]) if groups else np.zeros(0)
    correlated = len(advantages) > 1 and advantages.std(0).all()
    return [
        ["group mean of critic values", len(pairs), _mean_abs([a - b for a, b in pairs]), None],
        [
            "centred (advantages)",
            len(advantages),
            _mean_abs(advantages[:, 0] - advantages[:, 1]),
            float(np.corrcoef(advantages.T)[0, 1]) if correlated else None,
        ],
        ["individual critic values", len(individual), _mean_abs(individual), None],
    ]


def centred(groups: Sequence[Probe]) -> np.ndarray:
    """Critic-based against GRPO's advantages, `v_i - mean v` and `r_i - mean r`, over groups with f > 0; [continuations, 2]."""
    parts = [np.stack([g.v - g.v.mean(), g.r - g.r.mean()], axis=1) for g in groups if g.f > 0]
    return np.concatenate(parts) if parts else np.zeros((0, 2))


def values_by_prompt(groups: Sequence[Probe]) -> list[list[Any]]:
    """V(s) against the mean reward, by prompt; label, prefixes, answers that were no value, MAE, Spearman, spread of the values.

    The error counts an invalid answer as 1, as readiness does; correlation and spread are of the valid ones.
    """
    kinds: list[tuple[str, list[Probe], Callable[[Probe], float | None]]] = [
        ("without reference", list(groups), lambda g: g.plain),
        ("without reference, where there is one", _with_reference(groups), lambda g: g.plain),
        ("with reference", _with_reference(groups), lambda g: g.informed),
    ]
    rows = []
    for label, chosen, value_of in kinds:
        values = [value_of(g) for g in chosen]
        truth = [float(g.r.mean()) for g in chosen]
        valid = np.array([(v, r) for v, r in zip(values, truth, strict=True) if v is not None]).reshape(-1, 2)
        error = _mean_abs([1.0 if v is None else v - r for v, r in zip(values, truth, strict=True)])
        spearman = rank_correlation(valid[:, 0], valid[:, 1]) if len(valid) > 1 else None
        rows.append(
            [label, len(values), len(values) - len(valid), error, spearman, float(valid[:, 0].std()) if len(valid) else None]
        )
    return rows


def _with_reference(groups: Sequence[Probe]) -> list[Probe]:
    return [g for g in groups if g.informed is not None]


def _mean_abs(errors: Any) -> float | None:
    return float(np.abs(errors).mean()) if len(errors) else None


def errors_by_reference(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float | None]:
    """The error at the prefix without the reference and with it, of groups that have one (Figure 2, fourth panel)."""
    _, without, informed = values_by_prompt(probes(rows)[0])
    return without[3], informed[3]
