"""How good a critic is, as figures and tables: AC2's Figures 4 and 10 to 18, Tables 1 and 2, and Figure 2's fourth panel."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipelines.report.page import Page, axes_grid
from pipelines.report.probes import GroupFolder, Probe, by_f, centred, errors_by_reference, probes, sample_counts, values_by_prompt
from pipelines.report.runs import ReportError

Panel = Callable[[Any, Any, Sequence[Probe]], None]  # figure, axes, groups


def group_means(figure: Any, axis: Any, groups: Sequence[Probe]) -> None:
    """Mean endpoint value against mean reward, coloured by the share of critic-scored ends (Figures 4 and 12)."""
    drawn = axis.scatter(
        [g.r.mean() for g in groups], [g.v.mean() for g in groups], c=[100 * g.f for g in groups], s=12, cmap="viridis", alpha=0.8
    )
    figure.colorbar(drawn, ax=axis, label="% scored by the critic", shrink=0.8)
    _square(axis, "group means", "mean reward", "mean endpoint value")


def prefix_rewards(figure: Any, axis: Any, groups: Sequence[Probe]) -> None:
    """V(s) against mean reward (Figures 4 and 10)."""
    _spread(axis, [(g.r.mean(), g.value) for g in groups if g.value is not None])
    _square(axis, "prefix values", "mean reward", "V(s)")


def prefix_endpoints(figure: Any, axis: Any, groups: Sequence[Probe]) -> None:
    """V(s) against mean endpoint value (Figure 13, left)."""
    _spread(axis, [(g.v.mean(), g.value) for g in groups if g.value is not None])
    _square(axis, "prefix values", "mean endpoint value", "V(s)")


def end_values(figure: Any, axis: Any, groups: Sequence[Probe]) -> None:
    """Means over the critic-scored ends of a group against their mean reward, where there are two (Figures 11 and 14 to 16)."""
    ends = [(g.r[g.probed].mean(), g.v[g.probed].mean()) for g in groups if g.probed.sum() >= 2]
    axis.scatter([r for r, _ in ends], [v for _, v in ends], s=12, alpha=0.5, linewidth=0)
    _square(axis, "critic-scored ends (2 or more)", "mean reward", "mean critic value")


def advantages(figure: Any, axis: Any, groups: Sequence[Probe]) -> None:
    """Advantages by the critic against GRPO's (Figures 4 and 14 to 16)."""
    pairs = centred(groups)
    axis.hexbin(pairs[:, 1], pairs[:, 0], gridsize=24, cmap="Blues", bins="log", extent=(-1, 1, -1, 1))
    _square(axis, "advantages", "r - mean r", "v - mean v", low=-1)


def chunk_ends(figure: Any, axis: Any, groups: Sequence[Probe]) -> None:
    """The critic's value after a chunk against the reward at its continuation's end, one point each (Figures 17 and 18)."""
    _spread(axis, [pair for g in groups for pair in zip(g.r[g.probed], g.v[g.probed], strict=True)], both=True)
    _square(axis, "ends of chunks", "reward", "V at the chunk's end")


def _spread(axis: Any, pairs: Sequence[tuple[Any, Any]], both: bool = False) -> None:
    """Points; values lie on a grid, often rewards too (`both`), and would hide one another without a jitter."""
    points = np.array(pairs, float).reshape(-1, 2)
    jitter = np.random.default_rng(0).normal(0, 0.008, points.shape) * (1.0 if both else np.array([0.0, 1.0]))
    axis.scatter(*(points + jitter).T, s=12, alpha=min(0.5, max(0.08, 150 / max(len(points), 1))), linewidth=0)


def _square(axis: Any, title: str, xlabel: str, ylabel: str, low: float = 0) -> None:
    axis.plot([low, 1], [low, 1], color="black", linewidth=0.8, alpha=0.5)
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel, xlim=(low - 0.04, 1.04), ylim=(low - 0.04, 1.04), aspect="equal")


PANELS: tuple[Panel, ...] = (group_means, prefix_rewards, prefix_endpoints, end_values, chunk_ends, advantages)


def diagnose(page: Page, folders: Sequence[GroupFolder]) -> None:
    """Fill a page from the groups of one or more checkpoints."""
    errors = {}
    for folder in folders:
        groups, left_out = probes(folder.rows)
        if not groups:
            raise ReportError(f"{folder.name}: no group has both rewards and values.")
        page.heading(folder.name)
        page.text(
            f"{len(groups)} groups; left out: " + ", ".join(f"{count} continuations {why}" for why, count in left_out.items())
        )
        errors[folder.name] = errors_by_reference(folder.rows)
        header = ["V(s) against the mean reward", "prefixes", "no value", "MAE", "Spearman", "spread"]
        page.table(f"{folder.name}-prefix", header, values_by_prompt(groups))
        page.table(f"{folder.name}-by-f", ["mean of v against mean of r", "groups", "MAE", "signed bias"], by_f(groups))
        page.table(f"{folder.name}-errors", ["critic against reward", "n", "MAE", "Pearson r"], sample_counts(groups))
        figure, axes = axes_grid(3, width=4.4, height=3.9, rows=2)
        for axis, panel in zip(axes.flat, PANELS, strict=True):
            panel(figure, axis, groups)
        page.figure(f"{folder.name}-values", figure)
    known = {
        name: (without, informed) for name, (without, informed) in errors.items() if without is not None and informed is not None
    }
    if known:
        _reference_figure(page, known)


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
