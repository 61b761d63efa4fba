"""How good a critic is, from groups that were continued to their end: AC2's section 4.4 and Appendix A.4."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from algorithms.ac2_memory import rank_correlation
from pipelines.report.page import Page, axes_grid
from pipelines.report.runs import ReportError


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


def read_groups(paths: Iterable[str]) -> list[dict[str, Any]]:
    """All groups of folders that this job wrote."""
    files = [file for path in paths for file in sorted(Path(path).glob("groups-*.parquet"))]
    if not files:
        raise ReportError(f"{', '.join(paths)}: no groups there; make them with python -m pipelines.replay.")
    return [row for file in files for row in pq.read_table(file).to_pylist()]


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


def prefix_values(groups: Sequence[Probe]) -> list[list[Any]]:
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


def diagnose(page: Page, named: dict[str, Sequence[dict[str, Any]]]) -> None:
    """Fill a page from the groups of one or more checkpoints, by name."""
    errors_by_prompt = {}
    for name, rows in named.items():
        groups, left_out = probes(rows)
        if not groups:
            raise ReportError(f"{name}: no group has both rewards and values.")
        page.heading(name)
        page.text(
            f"{len(groups)} groups; left out: " + ", ".join(f"{count} continuations {why}" for why, count in left_out.items())
        )
        prefix = prefix_values(groups)
        errors_by_prompt[name] = (prefix[1][3], prefix[2][3])
        header = ["V(s) against the mean reward", "prefixes", "no value", "MAE", "Spearman", "spread"]
        page.table(f"{name}-prefix", header, prefix)
        page.table(f"{name}-by-f", ["mean of v against mean of r", "groups", "MAE", "signed bias"], by_f(groups))
        page.table(f"{name}-errors", ["critic against reward", "n", "MAE", "Pearson r"], sample_counts(groups))
        _figure(page, name, groups)
    known = {name: pair for name, pair in errors_by_prompt.items() if None not in pair}
    if known:
        _reference_figure(page, known)


def _figure(page: Page, name: str, groups: Sequence[Probe]) -> None:
    """Figure 4 and its companions: group means, prefix values, values at chunk ends, advantages."""
    figure, axes = axes_grid(4, width=3.7, height=3.5)
    means, prefix, ends, advantages = axes
    rewards = np.array([g.r.mean() for g in groups])
    drawn = means.scatter(rewards, [g.v.mean() for g in groups], c=[100 * g.f for g in groups], s=12, cmap="viridis", alpha=0.8)
    figure.colorbar(drawn, ax=means, label="% scored by the critic", shrink=0.8)
    means.set(xlabel="mean reward", ylabel="mean endpoint value", title="group means")
    valued = [(g.r.mean(), g.value) for g in groups if g.value is not None]
    jitter = np.random.default_rng(0).normal(0, 0.008, len(valued))  # values lie on a grid and would hide one another
    prefix.scatter([r for r, _ in valued], np.array([v for _, v in valued]) + jitter, s=12, alpha=0.5, linewidth=0)
    prefix.set(xlabel="mean reward", ylabel="V(s)", title="prefix values")
    both = [(g.v[g.probed].mean(), g.r[g.probed].mean()) for g in groups if g.probed.sum() >= 2]
    ends.scatter([r for _, r in both], [v for v, _ in both], s=12, alpha=0.5, linewidth=0)
    ends.set(xlabel="mean reward", ylabel="mean critic value", title="critic-scored ends (2 or more)")
    pairs = centred(groups)
    advantages.hexbin(pairs[:, 1], pairs[:, 0], gridsize=24, cmap="Blues", bins="log", extent=(-1, 1, -1, 1))
    advantages.set(xlabel="r - mean r", ylabel="v - mean v", title="advantages")
    for axis, (low, high) in zip(axes, ((0, 1), (0, 1), (0, 1), (-1, 1)), strict=True):
        axis.plot([low, high], [low, high], color="black", linewidth=0.8, alpha=0.5)
        axis.set(xlim=(low - 0.04, high + 0.04), ylim=(low - 0.04, high + 0.04), aspect="equal")
    page.figure(f"{name}-values", figure)


def _reference_figure(page: Page, errors: dict[str, tuple[float, float]]) -> None:
    """Figure 2, fourth panel: the error at the prefix with the reference in the prompt and without."""
    page.heading("What a reference solution is worth")
    figure, (axis,) = axes_grid(1, width=max(4.0, 1.4 * len(errors) + 2.5), height=3.2)
    at = np.arange(len(errors))
    for offset, (label, i) in zip((-0.2, 0.2), (("without reference", 0), ("with reference", 1)), strict=True):
        bars = axis.bar(at + offset, [pair[i] for pair in errors.values()], width=0.38, label=label)
        axis.bar_label(bars, fmt="%.3f", fontsize=8, padding=2)
    axis.set(ylabel="MAE of V(s)", xticks=at, xticklabels=list(errors), ylim=(0, 1.25 * max(max(pair) for pair in errors.values())))
    axis.legend(frameon=False, fontsize=8)
    page.figure("reference", figure)
