"""What runs cost: device hours against decoding FLOPs (AC2 Figure 19), and exact against mean-based FLOPs (AC2 Table 3)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelines.report.curves import TERA, least_squares
from pipelines.report.page import COLOURS, Page, axes_grid
from pipelines.report.runs import Configuration, Run

SECONDS = ("timing_s/step", "timing_s/save_checkpoint")


def hours_against_flops(page: Page, configurations: Sequence[Configuration], name: str = "cost") -> bool:
    """Figure 19: a point for each step, the least-squares line, and its numbers; whether there were steps enough.

    A step's time has generation, judging, updates, weights to the engines and its checkpoint; validation and the first step of
    a run, which pays for starts, are left out.
    """
    points = [(one.label, *_steps(one)) for one in configurations]
    points = [point for point in points if len(point[1]) > 2]
    if not points:
        return False
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
    page.figure(name, figure)
    page.table(name, ["configuration", "steps", "hours at 0 TFLOP", "hours per TFLOP", "Pearson r"], rows)
    return True


def _steps(one: Configuration) -> tuple[np.ndarray, np.ndarray]:
    """Decoding FLOPs and device hours of every step but each run's first."""
    spent: list[float] = []
    took: list[float] = []
    for run in one.runs:
        flops = run.metrics.get("decode/flops", {})
        for step in run.series(SECONDS[0])[0].tolist()[1:]:
            if step in flops:
                spent.append(flops[step])
                took.append(sum(run.metrics.get(name, {}).get(step, 0.0) for name in SECONDS) * devices(run.params) / 3600)
    return np.array(spent), np.array(took)


def devices(params: dict[str, str]) -> float:
    """GPUs of a run; 1 where it has none, for the machine."""

    def number(name: str) -> float:
        return float(params.get(f"cluster.{name}", 0) or 0)

    engines = number("engines.count") * number("engines.num_gpus") * max(number("engines.tensor_parallel_size"), 1)
    return (engines + number("learner.ranks") * number("learner.num_gpus")) or 1.0


def cost_records(page: Page, configurations: Sequence[Configuration], name: str) -> bool:
    """Table 3, and equations 7 and 8 as a check of it: runs here keep joint lengths, so the exact cost is what figures show."""
    rows: list[list[Any]] = []
    for one in configurations:
        for run in one.runs:
            exact, means = (run.metrics.get(metric, {}) for metric in ("decode/flops", "decode/flops_from_means"))
            both = [(exact[step], means[step]) for step in sorted(exact) if step in means]
            if both:
                rows.append([_seed_label(one, run), "joint lengths", max(exact), *_against_means(both)])
    if rows:
        header = [
            "run",
            "length source",
            "last cost step",
            "TFLOP, exact",
            "from means (eq. 7)",
            "left out (eq. 8)",
            "means against exact",
        ]
        page.table(name, header, rows)
    return bool(rows)


def _against_means(both: Sequence[tuple[float, float]]) -> list[Any]:
    exact, means = np.sum(both, axis=0) / TERA
    return [float(exact), float(means), float(exact - means), f"{(means - exact) / exact:+.2%}"]


def _seed_label(one: Configuration, run: Run) -> str:
    return one.label if len(one.runs) == 1 else f"{one.label} seed={run.params.get('seed', '?')}"
