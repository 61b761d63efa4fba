"""Figures and tables of the AC2 paper (Trust the Critic More)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipelines.report import diagnostics
from pipelines.report.cost import cost_records, hours_against_flops
from pipelines.report.curves import SELF_CRITIC, Curve, draw, legend, panels, score_curves
from pipelines.report.page import Page, axes_grid
from pipelines.report.paper import Exhibit, Material, NeedsError, settings_table
from pipelines.report.probes import GroupFolder, by_f, errors_by_reference, probes, sample_counts
from pipelines.report.runs import Configuration
from pipelines.store.outbox import metric_key

MAIN = ("ac2", "prefix_grpo", "grpo")
COMPARABLE = ("ac2", "ac2_no_audit", "ac2_no_group", "ac2_stale", "grpo")
BEHIND = ("ac2", "ac2_no_local_readiness", "ac2_correct_only", "ac2_short_chunks", "grpo")
STEPS = (40, 57, 80, 160)  # the checkpoints that the paper diagnoses

SETTINGS = {
    "Group size g": "algorithm.group_size",
    "Audit fraction": "algorithm.audit_fraction",
    "Replayed prefixes per step": "algorithm.problems_per_step",
    "Fresh problems per step": "algorithm.replay.refill_problems",
    "Replay buffer capacity": "algorithm.replay.capacity",
    "Total response budget": "algorithm.max_new_tokens",
    "Action-chunk length b": "algorithm.chunk_tokens",
    "Prefix cut grid": "algorithm.replay.cut_grid",
    "Prefix cut maximum fraction": "algorithm.replay.max_cut_fraction",
    "Critic buffer capacity": "algorithm.self_critic.buffer_pairs",
    "Prefix-target pairs per critic update": "algorithm.self_critic.pairs_per_update",
    "Valid rewards needed for a critic target": "algorithm.min_valid",
    "Actor learning rate": "optimizer.lr",
    "Initial critic learning rate": "algorithm.self_critic.rate.initial",
    "Critic learning-rate floor": "algorithm.self_critic.rate.floor",
    "Critic gradient-norm clip": "algorithm.self_critic.clip_grad_norm",
    "Readiness window": "algorithm.readiness.window",
    "Global readiness threshold": "algorithm.readiness.global_threshold",
    "Local readiness threshold": "algorithm.readiness.local_threshold",
    "Training temperature": "sampling.temperature",
    "Training top-p": "sampling.top_p",
    "Training top-k": "sampling.top_k",
    "Evaluation responses per problem": "evaluation.n",
    "Evaluation interval": "evaluation.every",
    "Evaluation temperature": "evaluation.temperature",
    "Evaluation top-p": "evaluation.top_p",
    "Evaluation top-k": "evaluation.top_k",
    "Evaluation response limit": "task.max_new_tokens",
}


def _score_by(axes: Any, configurations: Sequence[Configuration], by: Sequence[str], metric: str | None = None) -> None:
    for axis, one in zip(axes, by, strict=True):
        score_curves(axis, configurations, one, metric)


def main_scores(page: Page, material: Material, name: str, algorithms: Sequence[str] = MAIN, least: int = 2) -> str:
    """Mean score against decoding FLOPs and steps."""
    found = material.of(*algorithms, least=least)
    figure, axes = axes_grid(2)
    _score_by(axes, found, ("flops", "step"))
    axes[0].set(ylabel="mean score")
    legend(figure, axes, found)
    page.figure(name, figure)
    return material.absent(*algorithms)


def critic_readiness(page: Page, material: Material, name: str) -> str:
    """Ready fraction, critic error and audit error by step; beside them the error with a reference and without."""
    found = material.of("ac2")
    pairs = [(one, errors_by_reference(one.rows)) for one in material.probed]
    known = [(one, errors) for one, errors in pairs if None not in errors]
    figure, axes = axes_grid(4 if known else 3, width=3.4, height=3.0)
    for axis, curve in zip(axes, SELF_CRITIC, strict=False):
        draw(axis, found, curve)
    if known:
        _errors_by_prompt(axes[3], known)
    legend(figure, axes, found)
    page.figure(name, figure)
    return "" if known else "without the fourth panel, which needs groups of pipelines.replay mode=probe"


def _errors_by_prompt(axis: Any, known: Sequence[tuple[GroupFolder, tuple[float | None, float | None]]]) -> None:
    for i, label in enumerate(("without reference", "with reference")):
        axis.plot([one.step for one, _ in known], [errors[i] for _, errors in known], marker="o", color=f"C{7 + i}", label=label)
    axis.set(title="MAE by prompt", xlabel="step of the checkpoint")


def ablations(page: Page, material: Material, name: str, by: str) -> str:
    """Variants that do about as well, and variants that fall behind."""
    figure, axes = axes_grid(2, width=5.0)
    for axis, algorithms, title in zip(axes, (COMPARABLE, BEHIND), ("comparable", "behind"), strict=True):
        score_curves(axis, material.of(*algorithms, least=2), by)
        axis.set(title=title, ylabel="mean score")
        axis.legend(frameon=False, fontsize=7)
    page.figure(name, figure)
    return material.absent(*dict.fromkeys((*COMPARABLE, *BEHIND)))


def learning_rates(page: Page, material: Material, name: str) -> str:
    """GRPO at several learning rates."""
    found = material.of("grpo")
    rates = {one.runs[0].params.get("optimizer.lr") for one in found}
    if len(rates) < 2:
        raise NeedsError("runs of grpo with several values of optimizer.lr")
    return main_scores(page, material, name, ("grpo",), least=1)


def ready_fractions(page: Page, material: Material, name: str) -> str:
    """Ready fraction with local readiness and without."""
    variants = ("ac2_no_group", "ac2_no_local_readiness")
    page.figure(name, panels(material.of(*variants, least=2), [Curve("ready fraction of the sampled", "ac2/ready_fraction")]))
    return ""


def best_of_k(page: Page, material: Material, name: str) -> str:
    """Mean and best of 16, or of as many responses as the runs evaluate, against decoding FLOPs."""
    found = material.of("ac2", "grpo", least=2)
    metrics = {k: metric_key(f"val-core/mean/acc/best@{k}/mean") for k in (16, 8, 4, 2)}
    k = next((k for k, metric in metrics.items() if all(one.logged(metric) for one in found)), None)
    if k is None:
        raise NeedsError("runs with evaluation.n=16, or at least 2")
    figure, axes = axes_grid(2)
    score_curves(axes[0], found, "flops")
    score_curves(axes[1], found, "flops", metrics[k])
    axes[0].set(ylabel="mean score")
    axes[1].set(ylabel=f"best of {k} (bootstrap)")
    legend(figure, axes, found)
    page.figure(name, figure)
    return "" if k == 16 else f"the best of {k}, for the runs evaluate no 16 responses"


def diagnosed(page: Page, material: Material, name: str, wanted: Sequence[tuple[int, diagnostics.Panel]]) -> str:
    """Panels of a checkpoint's groups; each says which step of the paper's, and which panel."""
    if not material.continued:
        raise NeedsError("groups of pipelines.replay of a checkpoint")
    figure, axes = axes_grid(len(wanted), width=3.7, height=3.5)
    shown: dict[int, int] = {}
    for axis, (step, panel) in zip(axes, wanted, strict=True):
        one = standing_for(material.continued, step)
        shown[step] = one.step
        panel(figure, axis, probes(one.rows)[0])
        axis.set(title=f"{axis.get_title()}, step {one.step}")
    page.figure(name, figure)
    other = [f"step {mine} for the paper's {step}" for step, mine in shown.items() if mine != step]
    return ", ".join(other)


def standing_for(folders: Sequence[GroupFolder], step: int) -> GroupFolder:
    """The checkpoint of a step of the paper's, or of those there are the one at the same place in their order."""
    ordered = sorted(folders, key=lambda one: one.step)
    exact = [one for one in ordered if one.step == step]
    return exact[0] if exact else ordered[STEPS.index(step) * len(ordered) // len(STEPS)]


def value_tables(page: Page, material: Material, name: str, rows_of: Callable[..., list[list[Any]]], header: Sequence[str]) -> str:
    """A table with the rows of every checkpoint below each other."""
    if not material.continued:
        raise NeedsError("groups of pipelines.replay of a checkpoint")
    ordered = sorted(material.continued, key=lambda one: one.step)
    page.table(name, ["step", *header], [[one.step, *row] for one in ordered for row in rows_of(probes(one.rows)[0])])
    return ""


def costs(page: Page, material: Material, name: str) -> str:
    """Decoding-cost records of every run."""
    if not cost_records(page, material.configurations, name):
        raise NeedsError("runs that log decode/flops_from_means")
    return ""


def hours(page: Page, material: Material, name: str) -> str:
    """Device hours of AC2's steps."""
    if not hours_against_flops(page, material.of("ac2"), name):
        raise NeedsError("a run of ac2 with more than three steps")
    return ""


def settings(page: Page, material: Material, name: str) -> str:
    """What the AC2 runs were set to."""
    settings_table(page, name, SETTINGS, {one.label: one for one in material.of("ac2")})
    return ""


def _kinds(*wanted: tuple[int, diagnostics.Panel]) -> Callable[[Page, Material, str], str]:
    return partial(diagnosed, wanted=wanted)


_ends_and_advantages = [_kinds((step, diagnostics.end_values), (step, diagnostics.advantages)) for step in (40, 57, 160)]
EXHIBITS = [
    Exhibit("Figure 1", "AC2, Prefix GRPO and GRPO: mean score by decoding FLOPs and by steps", main_scores),
    Exhibit("Figure 2", "Critic readiness and accuracy", critic_readiness),
    Exhibit("Figure 3", "Component ablations by decoding FLOPs", partial(ablations, by="flops")),
    Exhibit(
        "Figure 4",
        "Group means, prefix values and advantages against terminal rewards",
        _kinds((80, diagnostics.group_means), (80, diagnostics.prefix_rewards), (80, diagnostics.advantages)),
    ),
    Exhibit("Figure 5", "GRPO's learning rates", learning_rates),
    Exhibit("Figure 6", "Component ablations by steps", partial(ablations, by="step")),
    Exhibit("Figure 7", "Chunk sizes", partial(main_scores, algorithms=("ac2", "ac2_short_chunks"))),
    Exhibit("Figure 8", "Ready fractions with and without local readiness", ready_fractions),
    Exhibit("Figure 9", "Best of 16", best_of_k),
    Exhibit("Figure 10", "Prefix values", _kinds((57, diagnostics.prefix_rewards), (160, diagnostics.prefix_rewards))),
    Exhibit("Figure 11", "Means of critic values", _kinds((80, diagnostics.end_values))),
    Exhibit("Figure 12", "Group means", _kinds((40, diagnostics.group_means), (57, diagnostics.group_means))),
    Exhibit(
        "Figure 13",
        "Prefix values against mean endpoint values, and group means",
        _kinds((80, diagnostics.prefix_endpoints), (160, diagnostics.group_means)),
    ),
    Exhibit("Figure 14", "Critic values and advantages at step 40", _ends_and_advantages[0]),
    Exhibit("Figure 15", "Critic values and advantages at step 57", _ends_and_advantages[1]),
    Exhibit("Figure 16", "Critic values and advantages at step 160", _ends_and_advantages[2]),
    Exhibit(
        "Figure 17", "Value of a chunk's end against its reward", _kinds((40, diagnostics.chunk_ends), (57, diagnostics.chunk_ends))
    ),
    Exhibit("Figure 18", "The same, later", _kinds((80, diagnostics.chunk_ends), (160, diagnostics.chunk_ends))),
    Exhibit("Figure 19", "Device hours against decoding FLOPs per step", hours),
    Exhibit(
        "Table 1",
        "Error of the group-mean value by f",
        partial(value_tables, rows_of=by_f, header=("f", "groups", "MAE", "signed bias")),
    ),
    Exhibit(
        "Table 2",
        "Sample counts and errors",
        partial(value_tables, rows_of=sample_counts, header=("critic against reward", "n", "MAE", "Pearson r")),
    ),
    Exhibit("Table 3", "Decoding-cost records", costs),
    Exhibit("Table 4", "Configuration", settings),
]
