"""Curves of runs: metrics by step or by decoding FLOPs, seeds as a mean and a band from the lowest to the highest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.report.page import COLOURS, axes_grid
from pipelines.report.runs import Configuration, Run

WINDOW = 5  # steps of both papers' moving means
TERA = 1e12
Smoothing = Callable[[np.ndarray], np.ndarray]


def trailing(values: np.ndarray) -> np.ndarray:
    """The mean of each value and the four before it (AC2 Figure 2)."""
    return np.array([values[max(0, i - WINDOW + 1) : i + 1].mean() for i in range(len(values))])


def centred(values: np.ndarray) -> np.ndarray:
    """The mean of each value and the two on either side, of those that there are (EasyPPO section 5)."""
    half = WINDOW // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def raw(values: np.ndarray) -> np.ndarray:
    """The values as they are."""
    return values


@dataclass(frozen=True)
class Curve:
    """One panel: a metric by step (None: the validation score), how it is smoothed, and whether its axis is symmetric-log."""

    title: str
    metric: str | None
    smooth: Smoothing = trailing
    symlog: bool = False


# AC2's Figure 2, and EasyPPO's Figure 2.
SELF_CRITIC = (
    Curve("ready fraction", "ac2/ready_fraction"),
    Curve("critic error", "ac2/critic_mae"),
    Curve("audit error", "ac2/audit_mae"),
)
ROLLOUTS = (
    Curve("truncation ratio", "response_length/clip_ratio", centred),
    Curve("reward of the completed", "critic/score/completed_mean", centred),
    Curve("training reward", "critic/score/mean", centred),
)
EXPLAINED_VARIANCE = Curve("explained variance", "critic/vf_explained_var", raw, symlog=True)


def panels(configurations: Sequence[Configuration], curves: Sequence[Curve]) -> Any:
    """A figure with one curve in each panel, by step; steps in which only the value model learnt are grey."""
    figure, axes = axes_grid(len(curves), width=3.4, height=3.0)
    for axis, curve in zip(axes, curves, strict=True):
        draw(axis, configurations, curve)
    legend(figure, axes, configurations)
    return figure


def draw(axis: Any, configurations: Sequence[Configuration], curve: Curve) -> None:
    """One curve of every configuration into a panel."""
    for colour, one in zip(COLOURS, configurations, strict=False):
        if one.runs:  # one without keeps its colour for the panels where it has some
            by_step(axis, one, curve, colour)
    axis.set(title=curve.title, xlabel="step")
    if curve.symlog:
        axis.set_yscale("symlog", linthresh=1.0)
        low = min((line.get_ydata().min() for line in axis.lines if len(line.get_ydata())), default=0.0)
        axis.set_ylim(min(1.3 * low, -0.1), 1.15)
        axis.axhline(0, color="black", linewidth=0.6, alpha=0.4)
    if steps := max((warmup_steps(one) for one in configurations), default=0):
        axis.axvspan(0, steps, color="tab:gray", alpha=0.15, linewidth=0)


def by_step(axis: Any, one: Configuration, curve: Curve, colour: str) -> None:
    """The smoothed mean over seeds; a single run's own steps faintly behind it, the lowest and highest of several as a band."""
    smooth: list[dict[int, float]] = []
    for run in one.runs:
        steps, values = run.series(curve.metric or run.score_metric() or "")
        smooth.append(dict(zip(steps.tolist(), curve.smooth(values).tolist(), strict=True)))
        if len(one.runs) == 1 and curve.smooth is not raw:
            axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    common = sorted(set().union(*smooth))
    at = [[seed[step] for seed in smooth if step in seed] for step in common]
    axis.plot(common, [np.mean(values) for values in at], color=colour, linewidth=1.8, label=one.label)
    if len(one.runs) > 1:
        axis.fill_between(common, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.15, linewidth=0)


def score_curves(axis: Any, configurations: Sequence[Configuration], by: str, metric: str | None = None) -> None:
    """A validation metric (the score unless one is named) against decoding FLOPs or, by="step", steps; at common evaluations."""
    for colour, one in zip(COLOURS, configurations, strict=False):
        values = one.at_evaluations(metric)
        flops = np.nan_to_num(one.flops()).mean(0) / TERA  # nothing is spent before the first step
        x = one.evaluations() if by == "step" else flops
        label = f"{one.label} ({len(one.runs)} seed{'s' * (len(one.runs) > 1)})"
        axis.plot(x, values.mean(0), color=colour, linewidth=2, marker="o", markersize=3, label=label)
        axis.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    axis.set(xlabel="step" if by == "step" else "decoding TFLOP")


def legend(figure: Any, axes: Any, configurations: Sequence[Configuration]) -> None:
    """One legend below the panels, as wide as fits."""
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = max(1, min(len(handles), int(figure.get_figwidth() * 12 // max(map(len, [*handles, "1234"])))))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def warmup_steps(one: Configuration) -> int:
    """Steps in which only the value model learns."""
    return max((_number(run, "algorithm.critic.warmup_steps") for run in one.runs), default=0)


def _number(run: Run, name: str) -> int:
    value = run.params.get(name, "")
    return int(value) if value.isdigit() else 0


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Slope, intercept and Pearson's r of the least-squares line; r is NaN where one side is constant."""
    if x.std() == 0:
        return 0.0, float(y.mean()), float("nan")
    slope, intercept = np.polyfit(x, y, 1)
    r: Any = np.corrcoef(x, y)[0, 1] if y.std() else float("nan")
    return float(slope), float(intercept), float(r)
