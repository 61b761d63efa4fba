"""Runs side by side: score against decoding FLOPs and steps, who passes whose peak for how much less, and the critic's health."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.report.cost import hours_against_flops
from pipelines.report.curves import (
    EXPLAINED_VARIANCE,
    ROLLOUTS,
    SELF_CRITIC,
    TERA,
    WINDOW,
    Curve,
    centred,
    panels,
    raw,
    score_curves,
)
from pipelines.report.page import COLOURS, Page, axes_grid
from pipelines.report.runs import Configuration
from pipelines.store.outbox import metric_key

SEEDS = "Bands reach from the lowest seed to the highest; faint lines are the steps of a single run."


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
    initializations(page, configurations)
    _cost(page, configurations)


def _names(configurations: Sequence[Configuration]) -> str:
    return ", ".join(sorted({one.label for one in configurations} | {one.algorithm for one in configurations})) or "none (no runs)"


def _curves(page: Page, configurations: Sequence[Configuration]) -> None:
    figure, (by_flops, by_step, best) = axes_grid(3)
    score_curves(by_flops, configurations, "flops")
    score_curves(by_step, configurations, "step")
    for colour, one in zip(COLOURS, configurations, strict=False):
        k, values = _best_of_k(one)
        if len(k):
            best.plot(k, values, color=colour, marker="o", markersize=4)
    by_flops.set(ylabel="validation mean")
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
    curves = [*SELF_CRITIC, Curve("rank correlation", "ac2/rank_correlation")]
    with_critic = [one for one in configurations if one.logged("ac2/critic_mae")]
    if with_critic:
        page.heading("The critic that is the model itself")
        page.figure("critic", panels(with_critic, curves))
        page.text(f"Lines are means over the last {WINDOW} steps. {SEEDS}")


def _critic_model_health(page: Page, configurations: Sequence[Configuration]) -> None:
    """EasyPPO's Figures 2 and 5: truncation and reward of rollouts, gradient norm and explained variance of the critic."""
    curves = [
        *ROLLOUTS,
        Curve("critic gradient norm", "critic/grad_norm", centred),
        EXPLAINED_VARIANCE,
    ]
    if any(one.logged("critic/vf_explained_var") for one in configurations):
        page.heading("Rollouts and the critic model")
        page.figure("critic-model", panels(configurations, curves))
        page.text(
            f"Lines are centred means of {WINDOW} steps, explained variance is unsmoothed; gradient norms are before clipping, and "
            f"grey are the steps in which only the value model learns. {SEEDS}"
        )


def initializations(page: Page, configurations: Sequence[Configuration], name: str = "initializations") -> bool:
    """EasyPPO's Figure 9 and its seeds: configurations whose runs begin with critics of their own; whether there are any."""
    several = [one for one in configurations if len(one.critic_initializations()) > 1]
    if several:
        curves = [ROLLOUTS[-1], Curve("validation", None, raw), EXPLAINED_VARIANCE]
        page.figure(name, panels(several, curves))
        counts = ", ".join(f"{len(one.critic_initializations())} of {one.label}" for one in several)
        page.text(f"Critic initializations: {counts}. Lines are means over them, bands reach from the lowest to the highest.")
    return bool(several)


def _cost(page: Page, configurations: Sequence[Configuration]) -> None:
    page.heading("Device hours against decoding FLOPs")
    if not hours_against_flops(page, configurations):
        page.text("No configuration has the three steps that a line needs.")
