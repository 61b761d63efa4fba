"""How much each response pulls at a critic, against how noisy its prompt's returns are (EasyPPO section 4 and Appendix 10.4).

A response's pull is the norm of its terminal-return gradient before clipping: `|| 1/N sum_t grad (V(s_t) - R)^2 / 2 ||` over all
parameters of the critic, with N the tokens of all responses. No optimizer step is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from algorithms.noise import noise_floor, noise_weights, return_std
from pipelines.report.curves import least_squares
from pipelines.report.page import Page, axes_grid
from pipelines.report.runs import ReportError

if TYPE_CHECKING:  # torch takes seconds, which other reports need not wait
    from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """How a figure is drawn, in parts of the reward range: floor of the weights (None: training's), bins, and where they end."""

    floor: float | None = None
    bins: int = 6
    widest: float | None = None


# As the paper draws them. Its AIME rewards are -1 and 1: a floor of 0.5, and four bins up to the greatest deviation that there is.
SCALES = {"frontiercs": Scale(0.075, 6, 0.3), "aime": Scale(0.25, 4, 0.5)}


@dataclass(frozen=True)
class Pulls:
    """The responses of one checkpoint."""

    label: str
    group_std: np.ndarray  # deviation of each prompt's returns, [prompts]
    group: np.ndarray  # which prompt a response answers, [responses]
    norm: np.ndarray  # norm of the response's gradient, [responses]
    floor: float
    left_out: int  # responses without a reward
    rewards: tuple[float, ...]  # all different ones, ascending

    @property
    def std(self) -> np.ndarray:
        """Deviation of the returns of each response's prompt."""
        return self.group_std[self.group]

    @property
    def weighted(self) -> np.ndarray:
        """Norms times their prompt's weight, which has a mean of one over prompts."""
        return noise_weights(self.group_std, self.floor)[self.group] * self.norm

    @property
    def range(self) -> float:
        """Greatest less least reward."""
        return self.rewards[-1] - self.rewards[0]

    def at_floor(self, floor: float | None) -> "Pulls":
        """The same with another floor, in parts of the reward range; None changes nothing."""
        return self if floor is None else replace(self, floor=floor * self.range or 1.0)


def rollouts_of(checkpoint: Path) -> Path:
    """The rollouts of the step that made a checkpoint."""
    file = checkpoint.parent.parent / "rollouts" / f"{checkpoint.name}.parquet"
    if not file.is_file():
        raise ReportError(
            f"{checkpoint}: {file} is not there; keep_rollouts may have dropped it; name other rollouts with rollouts=FILE."
        )
    return file


def measure(checkpoint: Path, rollouts: Path) -> Pulls:
    """The pull of each judged response of the rollouts on a checkpoint's critic, with training's floor: range / (2 sqrt(group))."""
    rows = [row for row in pq.read_table(rollouts).to_pylist() if row["purpose"] == "train"]
    samples: list[tuple[list[int], list[int], float, int]] = []
    group_stds: list[float] = []
    for row in rows:
        rewards = np.array([np.nan if reward is None else reward for reward in row["reward"]], float)
        std = return_std(rewards)
        if std is None:
            continue
        for response, reward in zip(row["response_ids"], rewards, strict=True):
            if not np.isnan(reward):
                samples.append((row["prompt_ids"] + row["prefix_ids"], response, float(reward), len(group_stds)))
        group_stds.append(std)
    if not samples:
        raise ReportError(f"{rollouts}: no prompt has two judged responses, so there is no spread to compare with.")
    seen = tuple(sorted({sample[2] for sample in samples}))
    step = checkpoint.name.removeprefix("step_").lstrip("0")
    return Pulls(
        label=f"step {step}" if step.isdigit() else checkpoint.name,
        group_std=np.array(group_stds),
        group=np.array([sample[3] for sample in samples]),
        norm=np.array(gradient_norms(checkpoint / "critic", samples)),
        floor=noise_floor((seen[0], seen[-1]), rows[0]["n"]) or 1.0,
        left_out=sum(row["n"] for row in rows) - len(samples),
        rewards=seen,
    )


def gradient_norms(critic: Path, samples: Sequence[tuple[list[int], list[int], float, int]]) -> list[float]:
    """The norm of each response's share of the batch's gradient; a response without tokens has none."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel

    from pipelines.trainer.value_folder import HEAD
    from pipelines.trainer.value_model import ValueModel

    if not (critic / HEAD).is_file():
        raise ReportError(f"{critic}: no critic there; give checkpoints of a run with a critic model (algorithm=ppo and its like).")
    weights = load_file(str(critic / HEAD))
    if len(weights["bias"]) != 1:
        raise ReportError(f"{critic}: has a categorical head; these gradients are those of squared errors of a scalar one.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ValueModel(AutoModel.from_pretrained(critic, dtype=torch.float32), 1).to(device)
    model.head.load_state_dict(weights)
    tokens = sum(len(response) for _, response, _, _ in samples)
    norms = []
    for prompt, response, reward, _ in samples:
        ids = torch.tensor([prompt + response], device=device)
        states = torch.arange(len(prompt) - 1, ids.shape[1] - 1, device=device)
        values = model(ids, torch.arange(ids.shape[1], device=device)[None], states)[:, 0]
        loss = ((values - reward).square() / 2).sum() / tokens
        norms.append(gradient_norm(loss, list(model.parameters())))
    return norms


def gradient_norm(loss: "Tensor", parameters: "Sequence[Tensor]") -> float:
    """The norm of a loss's gradient by parameters; a backbone may have some that its value does not touch."""
    import torch

    gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    return float(torch.nn.utils.get_total_norm([one for one in gradients if one is not None]))


def diagnose_gradients(page: Page, pulls: Sequence[Pulls], scale: Scale) -> None:
    """Fill a page: a table, Figures 3 and 10 (boxes), Figures 11 and 12 (scatter)."""
    rows: list[list[Any]] = []
    pulls = [one.at_floor(scale.floor) for one in pulls]
    for one in pulls:
        before, after = (least_squares(one.std, values) for values in (one.norm, one.weighted))
        rows.append([one.label, len(one.norm), one.left_out, f"{one.floor:.4g}", *_line(before), *_line(after), *_top(one)])
    page.heading("Pull of a response against the spread of its prompt's returns")
    header = [
        "checkpoint",
        "responses",
        "no reward",
        "floor",
        "slope",
        "r",
        "weighted slope",
        "weighted r",
        "top 10 %",
        "weighted top 10 %",
    ]
    page.table("gradients", header, rows)
    page.text(
        "Slope and r are of the least-squares line of gradient norm on the standard deviation of the prompt's returns. Top 10 %: "
        "the share of all norms that the tenth of responses with the largest has."
    )
    page.figure("boxes", boxes(pulls, scale))
    page.text(
        "Boxes are medians and quartiles of the responses in each interval of return deviation; whiskers reach to the "
        "outermost within 1.5 quartile ranges, all points beyond are shown."
    )
    page.figure("scatter", scatter(pulls))


def _line(line: tuple[float, float, float]) -> list[Any]:
    return [f"{line[0]:.2e}", line[2]]


def _top(one: Pulls) -> list[str]:
    def share(values: np.ndarray) -> str:
        top = np.sort(values)[-max(1, round(len(values) / 10)) :]
        return f"{top.sum() / values.sum():.0%}" if values.sum() else "-"

    return [share(one.norm), share(one.weighted)]


def by_bin(std: np.ndarray, values: np.ndarray, edges: np.ndarray) -> list[np.ndarray]:
    """The values of each interval of `std`: right-closed, zero in the first, what lies beyond the last edge in the last."""
    ends = np.round(edges[1:], 9)  # deviations on an edge differ from it by rounding
    place = np.clip(np.searchsorted(ends, np.round(std, 9), side="left"), 0, len(ends) - 1)
    return [values[place == i] for i in range(len(ends))]


def boxes(pulls: Sequence[Pulls], scale: Scale) -> Any:
    """Norms by interval of return deviation, plain and weighted; a column for each checkpoint, and one for all (Figures 3, 10)."""
    widest = (scale.widest or 0.0) * max(one.range for one in pulls) or max(float(one.std.max()) for one in pulls) or 1.0
    edges = np.linspace(0, widest, scale.bins + 1)
    columns = [(one.label, one.std, one.norm, one.weighted) for one in pulls]
    if len(pulls) > 1:
        std, norm, weighted = (np.concatenate(parts) for parts in zip(*[one[1:] for one in columns], strict=True))
        columns.append(("pooled", std, norm, weighted))
    figure, axes = axes_grid(len(columns), width=3.2, height=2.6, rows=2)
    for column, (label, std, *kinds) in zip(axes.T, columns, strict=True):
        for axis, values, name in zip(column, kinds, ("as they are", "noise-normalized"), strict=True):
            axis.boxplot(
                by_bin(std, values, edges),
                positions=(edges[:-1] + edges[1:]) / 2,
                widths=0.7 * widest / scale.bins,
                manage_ticks=False,
                flierprops={"markersize": 2.5, "alpha": 0.5},
                medianprops={"color": "tab:red"},
            )
            axis.set(title=f"{label}, {name}", xlim=(0, widest))
    _same_limits(axes)
    return figure


def scatter(pulls: Sequence[Pulls]) -> Any:
    """Norms against return deviation with their least-squares line, as they are and weighted (Figures 11 and 12)."""
    figure, axes = axes_grid(len(pulls), width=3.4, height=2.6, rows=2)
    for column, one in zip(axes.T, pulls, strict=True):
        for axis, values, name in zip(column, (one.norm, one.weighted), ("as they are", "noise-normalized"), strict=True):
            slope, intercept, _ = least_squares(one.std, values)
            axis.scatter(one.std, values, s=8, alpha=0.5, linewidth=0)
            ends = np.array([one.std.min(), one.std.max()])
            axis.plot(ends, intercept + slope * ends, color="tab:red", linewidth=1.5)
            axis.set(title=f"{one.label}, {name}")
    _same_limits(axes)
    return figure


def _same_limits(axes: np.ndarray) -> None:
    high = max(axis.get_ylim()[1] for axis in axes.flat)
    for axis in axes.flat:
        axis.set_ylim(0, high)
    for axis in axes[:, 0]:
        axis.set_ylabel("gradient norm")
    for axis in axes[-1]:
        axis.set_xlabel("return deviation of the prompt")
