"""Runs side by side: score against decoding FLOPs and steps, who passes whose peak for how much less, and the critic's health."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.report.page import COLOURS, Page, axes_grid
from pipelines.report.runs import Configuration
from pipelines.store.outbox import metric_key

TRAILING = 5  # steps over which AC2's Figure 2 averages
TERA = 1e12
PANELS = (
    f"Lines are means over the last {TRAILING} steps and over seeds; bands reach from the lowest seed to the highest, and faint "
    "lines are the steps of a single one."
)


@dataclass(frozen=True)
class Crossing:
    """Where one configuration first scores above another's peak (AC2 section 4.1)."""

    step: int
    flops: float  # its own, up to there
    ratio: float  # the other's FLOPs at its peak over these


def crossing(scores: np.ndarray, flops: np.ndarray, steps: np.ndarray, peak: float, peak_flops: float) -> Crossing | None:
    """The first evaluation after the start at which `scores` exceed `peak`; None if they never do. All arrays are [evaluations]."""
    above = np.flatnonzero((scores > peak) & (flops > 0))
    if not len(above):
        return None
    return Crossing(int(steps[above[0]]), float(flops[above[0]]), float(peak_flops / flops[above[0]]))


def compare(page: Page, configurations: Sequence[Configuration], baseline: str) -> None:
    """Fill a page; the one to pass is the configuration that `baseline` labels, or else the first of that algorithm."""
    shown = [one for one in configurations if len(one.evaluations())]
    left_out = [one.label for one in configurations if not len(one.evaluations())]
    page.heading("Score")
    if left_out:
        page.note(f"Without a common evaluation, and left out: {', '.join(left_out)}.")
    _curves(page, shown)
    _scores_table(page, shown)
    _by_source(page, shown)
    page.heading("Passing the baseline's peak")
    candidates = [one for one in shown if one.label == baseline] + [one for one in shown if one.algorithm == baseline]
    if not candidates:
        page.note(f"No baseline: baseline={baseline} is neither an algorithm nor a label here; give one of {_names(shown)}.")
    elif len(shown) == 1:
        page.note(f"{candidates[0].label} is the baseline, and there is no other configuration to pass it.")
    else:
        _crossings(page, shown, candidates[0])
    _critic_health(page, configurations)
    _critic_model_health(page, configurations)
    _cost(page, configurations)


def _names(configurations: Sequence[Configuration]) -> str:
    return ", ".join(sorted({one.label for one in configurations} | {one.algorithm for one in configurations})) or "none (no runs)"


def _curves(page: Page, configurations: Sequence[Configuration]) -> None:
    figure, (by_flops, by_step, best) = axes_grid(3)
    for colour, one in zip(COLOURS, configurations, strict=False):
        scores, flops = one.at_evaluations(), one.flops() / TERA
        flops = np.nan_to_num(flops)  # nothing is spent before the first step
        label = f"{one.label} ({len(one.runs)} seed{'s' * (len(one.runs) > 1)})"
        for axis, x in ((by_flops, flops.mean(0)), (by_step, one.evaluations())):
            axis.plot(x, scores.mean(0), color=colour, linewidth=2, marker="o", markersize=3, label=label)
            axis.fill_between(x, scores.min(0), scores.max(0), color=colour, alpha=0.15, linewidth=0)
        k, values = _best_of_k(one)
        if len(k):
            best.plot(k, values, color=colour, marker="o", markersize=4)
    by_flops.set(xlabel="decoding TFLOP", ylabel="validation mean")
    by_step.set(xlabel="step")
    best.set(xlabel="k", ylabel="pass@k or best of k, at the last evaluation")
    by_flops.legend(frameon=False, fontsize=7, loc="best")
    page.figure("score", figure)
    page.text(
        "Lines are means over seeds, bands reach from the lowest to the highest seed; of several data sources the score is the "
        "equal mean. The right panel is pass@k, unbiased, where rewards are 0 and 1; elsewhere it is the best of k by bootstrap."
    )


def _best_of_k(configuration: Configuration) -> tuple[np.ndarray, np.ndarray]:
    """k = 1, 2, 4, ... and pass@k (where rewards are 0 and 1) or best of k at the last common evaluation, mean over seeds."""
    metric = configuration.runs[0].score_metric() or ""
    found = {1: configuration.at_evaluations(metric)[:, -1].mean()}
    for k in (2, 4, 8, 16, 32, 64):
        names = (f"val-core/mean/acc/pass@{k}", f"val-core/mean/acc/best@{k}/mean")
        values = [configuration.at_evaluations(metric_key(name))[:, -1].mean() for name in names]
        found[k] = next((value for value in values if np.isfinite(value)), np.nan)
    ks = [k for k, value in found.items() if np.isfinite(value)]
    return np.array(ks), np.array([found[k] for k in ks])


def _scores_table(page: Page, configurations: Sequence[Configuration]) -> None:
    rows = []
    for one in configurations:
        scores, flops = one.at_evaluations(), np.nan_to_num(one.flops())
        at = int(scores.mean(0).argmax())
        rows.append(
            [
                one.label,
                len(one.runs),
                float(scores.mean(0)[0]),
                float(scores.mean(0).max()),
                f"{scores[:, at].min():.3f} to {scores[:, at].max():.3f}",
                int(one.evaluations()[at]),
                float(flops.mean(0)[at] / TERA),
                float(scores.mean(0)[-1]),
                float(flops.mean(0)[-1] / TERA),
            ]
        )
    header = ["configuration", "seeds", "start", "peak", "seeds at peak", "step", "TFLOP at peak", "last", "TFLOP in all"]
    page.table("scores", header, rows)


def _by_source(page: Page, configurations: Sequence[Configuration]) -> None:
    """Each data source by itself, where there are several: the mean score at the peak of the equal mean, and at the end."""
    sources = sorted({source for one in configurations for run in one.runs for source in run.sources()})
    if len(sources) < 2:
        return
    rows = []
    for one in configurations:
        at = int(one.at_evaluations().mean(0).argmax())
        n = (one.runs[0].score_metric() or "").rpartition("_")[2]
        for source in sources:
            scores = one.at_evaluations(metric_key(f"val-core/{source}/acc/mean@{n}")).mean(0)
            rows.append([one.label, source, *(float(scores[i]) if np.isfinite(scores[i]) else None for i in (0, at, -1))])
    page.table("sources", ["configuration", "data source", "start", "at the peak of the mean", "last"], rows)


def _crossings(page: Page, configurations: Sequence[Configuration], reference: Configuration) -> None:
    scores, flops = reference.at_evaluations(), np.nan_to_num(reference.flops())
    at = int(scores.mean(0).argmax())
    peak, peak_flops = float(scores.mean(0)[at]), float(flops.mean(0)[at])
    rows = []
    for one in configurations:
        if one is reference:
            continue
        own, spent, steps = one.at_evaluations(), np.nan_to_num(one.flops()), one.evaluations()
        found = crossing(own.mean(0), spent.mean(0), steps, peak, peak_flops)
        seeds = [crossing(a, b, steps, peak, peak_flops) for a, b in zip(own, spent, strict=True)]
        ratios = [f"{seed.ratio:.2f}" if seed else "never" for seed in seeds]
        rows.append(
            [
                one.label,
                found.step if found else "never",
                found.flops / TERA if found else None,
                f"{found.ratio:.2f}x" if found else None,
                ", ".join(ratios),
            ]
        )
    page.note(
        f"{reference.label} peaks at a mean of {peak:.3f} at step {int(reference.evaluations()[at])}, having spent "
        f"{peak_flops / TERA:.3f} decoding TFLOP. The ratio is these FLOPs over those of the other's first evaluation above that "
        "peak."
    )
    page.table("passing", ["configuration", "first above at step", "TFLOP there", "ratio", "ratio of each seed"], rows)


def _critic_health(page: Page, configurations: Sequence[Configuration]) -> None:
    """AC2's Figure 2, first three panels, and beside them whether the critic is more than a constant."""
    panels = {
        "ready fraction": "ac2/ready_fraction",
        "critic error": "ac2/critic_mae",
        "audit error": "ac2/audit_mae",
        "rank correlation": "ac2/rank_correlation",
    }
    with_critic = [one for one in configurations if any(run.metrics.get("ac2/critic_mae") for run in one.runs)]
    if with_critic:
        page.heading("The critic that is the model itself")
        page.figure("critic", _panels(with_critic, panels))
        page.text(PANELS)


def _critic_model_health(page: Page, configurations: Sequence[Configuration]) -> None:
    """EasyPPO's Figures 2 and 5: truncation and reward of rollouts, gradient norm and explained variance of the critic."""
    panels = {
        "truncation ratio": "response_length/clip_ratio",
        "training reward": "critic/score/mean",
        "reward of the completed": "critic/score/completed_mean",
        "critic gradient norm": "critic/grad_norm",
        "explained variance": "critic/vf_explained_var",
    }
    if any(run.metrics.get("critic/vf_explained_var") for one in configurations for run in one.runs):
        page.heading("Rollouts and the critic model")
        page.figure("critic-model", _panels(configurations, panels))
        page.text(f"{PANELS} Gradient norms are before clipping.")


def _panels(configurations: Sequence[Configuration], panels: dict[str, str]) -> Any:
    """A figure with a metric by step in each panel."""
    figure, axes = axes_grid(len(panels), width=3.4, height=3.0)
    for colour, one in zip(COLOURS, configurations, strict=False):
        for axis, (title, metric) in zip(axes, panels.items(), strict=True):
            _by_step(axis, one, metric, colour)
            axis.set(title=title, xlabel="step")
            if metric == "critic/vf_explained_var":
                axis.set_ylim(bottom=max(axis.get_ylim()[0], -1.0), top=1.0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(configurations), frameon=False)
    return figure


def _by_step(axis: Any, one: Configuration, metric: str, colour: str) -> None:
    """The trailing mean over its steps; a single run's steps faintly behind it, the lowest and highest of several as a band."""
    smooth: list[dict[int, float]] = []
    for run in one.runs:
        steps, values = run.series(metric)
        smooth.append(dict(zip(steps.tolist(), trailing(values).tolist(), strict=True)))
        if len(one.runs) == 1:
            axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    common = sorted(set().union(*smooth))
    at = [[seed[step] for seed in smooth if step in seed] for step in common]
    axis.plot(common, [np.mean(values) for values in at], color=colour, linewidth=1.8, label=one.label)
    if len(one.runs) > 1:
        axis.fill_between(
            common, [min(values) for values in at], [max(values) for values in at], color=colour, alpha=0.15, linewidth=0
        )


def trailing(values: np.ndarray) -> np.ndarray:
    """The mean of each value and the `TRAILING - 1` before it."""
    return np.array([values[max(0, i - TRAILING + 1) : i + 1].mean() for i in range(len(values))])


def _cost(page: Page, configurations: Sequence[Configuration]) -> None:
    """AC2's Figure 19: what a step takes against the FLOPs that it decodes."""
    points: list[tuple[str, np.ndarray, np.ndarray]] = []
    for one in configurations:
        spent: list[float] = []
        took: list[float] = []
        for run in one.runs:
            devices = _devices(run.params)
            steps, seconds = run.series("timing_s/step")
            known = run.metrics.get("decode/flops", {})
            for step, second in zip(steps.tolist()[1:], seconds[1:], strict=True):  # the first pays for starts
                if step in known:
                    spent.append(known[step])
                    took.append(second * devices / 3600)
        if len(spent) > 2:
            points.append((one.label, np.array(spent), np.array(took)))
    if not points:
        return
    page.heading("Device hours against decoding FLOPs")
    figure, (axis,) = axes_grid(1, width=6.0)
    rows = []
    for colour, (label, flops, hours) in zip(COLOURS, points, strict=False):
        slope, intercept, r = least_squares(flops / TERA, hours)
        axis.scatter(flops / TERA, hours, color=colour, s=9, alpha=0.6, linewidth=0, label=label)
        ends = np.array([flops.min(), flops.max()]) / TERA
        axis.plot(ends, intercept + slope * ends, color=colour, linewidth=1.2)
        rows.append([label, len(flops), f"{intercept:.2e}", f"{slope:.2e}", r])
    axis.set(xlabel="decoding TFLOP of a step", ylabel="device hours of a step")
    axis.legend(frameon=False, fontsize=7)
    page.figure("cost", figure)
    page.table("cost", ["configuration", "steps", "hours at 0 TFLOP", "hours per TFLOP", "Pearson r"], rows)


def _devices(params: dict[str, str]) -> float:
    """GPUs of a run; 1 where it has none, for the machine."""

    def number(name: str) -> float:
        return float(params.get(f"cluster.{name}", 0) or 0)

    engines = number("engines.count") * number("engines.num_gpus") * max(number("engines.tensor_parallel_size"), 1)
    return (engines + number("learner.ranks") * number("learner.num_gpus")) or 1.0


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Slope, intercept and Pearson's r of the least-squares line; r is NaN where one side is constant."""
    if x.std() == 0:
        return 0.0, float(y.mean()), float("nan")
    slope, intercept = np.polyfit(x, y, 1)
    r: Any = np.corrcoef(x, y)[0, 1] if y.std() else float("nan")
    return float(slope), float(intercept), float(r)
