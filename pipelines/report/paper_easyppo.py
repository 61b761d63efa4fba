"""Figures and tables of the EasyPPO paper (Stabilizing the Critic Is Key)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from pipelines.report.compare import initializations
from pipelines.report.critic_gradients import SCALES, Pulls, boxes, scatter
from pipelines.report.curves import EXPLAINED_VARIANCE, ROLLOUTS, Curve, centred, draw, legend, panels, raw
from pipelines.report.page import COLOURS, Page, axes_grid
from pipelines.report.paper import Exhibit, Material, NeedsError, settings_table
from pipelines.report.paper_easyppo_settings import ABLATIONS, CATEGORICAL, DIAGNOSTICS, METHOD, NORMALIZED, OPTIMIZER, TASK
from pipelines.report.runs import Configuration
from pipelines.store.outbox import metric_key

METHODS = ("ppo", "ppo_actor_filter", "hl_gauss_ppo", "vapo", "easyppo")
FILTERS = ("ppo", "ppo_joint_filter", "ppo_actor_filter")
VALIDATION = Curve("validation", None, raw)
GRADIENT_NORM = Curve("critic gradient norm", "critic/grad_norm", centred)


def by_task(configurations: Sequence[Configuration]) -> dict[str, list[Configuration]]:
    """Configurations by their task, in the order of their runs."""
    found: dict[str, list[Configuration]] = {}
    for one in configurations:
        found.setdefault(one.task, []).append(one)
    return found


def task_at(configurations: Sequence[Configuration], place: int) -> tuple[str, list[Configuration]]:
    """The first task, or another: the paper has FrontierCS and AIME. NeedsError where there are not as many."""
    tasks = list(by_task(configurations).items())
    if place >= len(tasks):
        raise NeedsError(f"runs on another task than {', '.join(name for name, _ in tasks)}")
    return tasks[place]


def filtering(page: Page, material: Material, name: str, place: int, curves: Sequence[Curve]) -> str:
    """PPO with no filtering, with actor and critic filtered, with the actor alone."""
    task, found = task_at(material.of(*FILTERS, least=2), place)
    page.figure(name, panels(found, curves))
    return _remarks(f"on {task}", material.absent(*FILTERS))


def main_comparison(page: Page, material: Material, name: str) -> str:
    """A column for each task: training reward above, validation below."""
    found = material.of(*METHODS, least=2)
    tasks = by_task(found)
    figure, axes = axes_grid(len(tasks), rows=2)
    axes = axes.reshape(2, -1)
    for column, (task, members) in zip(axes.T, tasks.items(), strict=True):
        for axis, curve in zip(column, (ROLLOUTS[-1], VALIDATION), strict=True):
            draw(axis, _coloured(members, found), curve)
        column[0].set(title=task, xlabel="", ylabel="training reward")
        column[1].set(title="", ylabel="validation")
    legend(figure, axes, found)
    page.figure(name, figure)
    return material.absent(*METHODS)


def _coloured(members: Sequence[Configuration], among: Sequence[Configuration]) -> list[Configuration]:
    """Configurations of one task with gaps for labels that only others have, so that a label has its colour in every column."""
    own = {one.label: one for one in members}
    return [own.get(label, Configuration(label, [])) for label in dict.fromkeys(one.label for one in among)]


def critic_diagnostics(page: Page, material: Material, name: str, others: bool) -> str:
    """Gradient norm and explained variance on the first task, or on all others."""
    found = material.of(*METHODS)
    task_at(found, int(others))
    tasks = list(by_task(found).items())[int(others) :][: None if others else 1]
    figure, axes = axes_grid(2 * len(tasks), width=3.4, height=3.0)
    for at, (task, members) in enumerate(tasks):
        for axis, curve in zip(axes[2 * at : 2 * at + 2], (GRADIENT_NORM, EXPLAINED_VARIANCE), strict=True):
            draw(axis, _coloured(members, found), curve)
            axis.set_title(f"{task}: {curve.title}", fontsize=10)
    legend(figure, axes, found)
    page.figure(name, figure)
    return _remarks(f"on {', '.join(task for task, _ in tasks)}", material.absent(*METHODS))


def pulls_of(material: Material, graded: bool) -> list[Pulls]:
    """Checkpoints whose rewards are graded, or two-valued."""
    found = [one for one in material.pulls if (len(one.rewards) > 2) == graded]
    if not found:
        raise NeedsError(f"checkpoints with a value model, of a run with {'graded' if graded else 'two-valued'} rewards")
    return found


def pull_figure(page: Page, material: Material, name: str, graded: bool, boxed: bool) -> str:
    """Norms of the responses' gradients against the spread of their prompt's returns."""
    scale = SCALES["frontiercs" if graded else "aime"]
    pulls = [one.at_floor(scale.floor) for one in pulls_of(material, graded)]
    page.figure(name, boxes(pulls, scale) if boxed else scatter(pulls))
    shown = ", ".join(one.label for one in pulls)
    return "" if shown == "step 30, step 60, step 90" else f"of {shown}"


def critic_minibatches(one: Configuration) -> int:
    """K: the value model's optimizer steps over a rollout batch."""
    return int(one.runs[0].params.get("algorithm.critic.minibatches", "0"))


def normalized(one: Configuration) -> bool:
    """Whether each prompt's loss is weighted by its noise."""
    return one.runs[0].params.get("algorithm.critic.noise_normalization") == "True"


def normalization(page: Page, material: Material, name: str) -> str:
    """With noise normalization and without, for each number of critic minibatches that has both."""
    found = material.of("easyppo", "ppo_actor_filter")
    kinds = {
        critic_minibatches(one): {normalized(other) for other in found if critic_minibatches(other) == critic_minibatches(one)}
        for one in found
    }
    both = [one for one in found if len(kinds[critic_minibatches(one)]) == 2]
    if not both:
        raise NeedsError("runs of easyppo with critic.noise_normalization true and false, at the same critic.minibatches")
    page.figure(name, panels(both, [ROLLOUTS[-1], VALIDATION]))
    missing = sorted({1, 4} - {critic_minibatches(one) for one in both})
    return f"without K = {', '.join(map(str, missing))}" if missing else ""


def first_nonnegative(steps: np.ndarray, values: np.ndarray) -> int | None:
    """The first step whose explained variance is at least zero; None if there is none."""
    at = np.flatnonzero(values >= 0)
    return int(steps[at[0]]) if len(at) else None


def minibatch_sizes(page: Page, material: Material, name: str) -> str:
    """Explained variance by step, and the first step at which it is not negative against K, from unsmoothed values."""
    found = sorted((one for one in material.of("easyppo") if normalized(one)), key=critic_minibatches)
    if len({critic_minibatches(one) for one in found}) < 2:
        raise NeedsError("runs of easyppo with several values of critic.minibatches, noise normalization on")
    figure, axes = axes_grid(2)
    draw(axes[0], found, Curve(EXPLAINED_VARIANCE.title, EXPLAINED_VARIANCE.metric, centred, symlog=True))
    never = 0
    for colour, one in zip(COLOURS, found, strict=False):
        firsts = [first_nonnegative(*run.series(EXPLAINED_VARIANCE.metric or "")) for run in one.runs]
        never += firsts.count(None)
        crossed = [first for first in firsts if first is not None]
        axes[1].scatter([critic_minibatches(one)] * len(crossed), crossed, color=colour, s=28)
    axes[1].set_xscale("log", base=2)
    axes[1].set(xlabel="critic minibatches K", ylabel="first step with explained variance >= 0", ylim=(0, None))
    axes[1].xaxis.set_major_formatter("{x:.0f}")
    legend(figure, axes, found)
    page.figure(name, figure)
    return f"{never} runs never reach zero" if never else ""


def critic_starts(page: Page, material: Material, name: str, algorithms: Sequence[str]) -> str:
    """Runs that begin with critics of their own."""
    if not initializations(page, material.of(*algorithms), name):
        raise NeedsError(f"runs of {' or '.join(algorithms)} with several values of scale.critic_head_seed")
    return ""


def data_sources(page: Page, material: Material, name: str) -> str:
    """Validation of each data source by itself, where a task has several."""
    several = [one for one in material.of(*METHODS) if len(one.runs[0].sources()) > 1]
    if not several:
        raise NeedsError("runs that validate on several data sources")
    task, found = task_at(several, 0)
    sources = found[0].runs[0].sources()
    n = (found[0].runs[0].score_metric() or "").rpartition("_")[2]
    columns = min(4, len(sources))
    figure, axes = axes_grid(columns, width=3.4, height=3.0, rows=-(-len(sources) // columns))
    for axis, source in zip(axes.flat, sources, strict=False):
        draw(axis, found, Curve(source, metric_key(f"val-core/{source}/acc/mean@{n}"), raw))
    for axis in axes.flat[len(sources) :]:
        axis.set_axis_off()
    legend(figure, axes, found)
    page.figure(name, figure)
    return _remarks(f"on {task}", material.absent(*METHODS))


def best_validation(page: Page, material: Material, name: str) -> str:
    """Each method's best validation score on each task, on a scale of 0 to 100."""
    tasks = by_task(material.of(*METHODS))
    best = {
        (task, one.label): 100 * float(one.at_evaluations().mean(0).max()) for task, members in tasks.items() for one in members
    }
    shown = dict.fromkeys(label for _, label in best)
    page.table(name, ["method", *tasks], [[method, *(_marked(best, task, method) for task in tasks)] for method in shown])
    return material.absent(*METHODS)


def _marked(best: dict[tuple[str, str], float], task: str, method: str) -> str | None:
    if (task, method) not in best:
        return None
    order = sorted((score for (other, _), score in best.items() if other == task), reverse=True)
    place = order.index(best[task, method])
    return f"{best[task, method]:.2f}{(' (best)', ' (second)', '')[min(place, 2)]}"


def settings(page: Page, material: Material, name: str, rows: dict[str, str], algorithms: Sequence[str], each: str) -> str:
    """What runs were set to, a column for each task or each method."""
    found = material.of(*algorithms)
    columns: dict[str, Configuration] = {}
    for one in found:
        columns.setdefault(one.task if each == "task" else one.label, one)
    settings_table(page, name, rows, columns)
    return ""


def _remarks(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _drawing(page: Page, material: Material, name: str) -> str:
    page.text(
        "Filter the actor's truncated responses only; weigh prompts by inverse spread of returns; clip small critic minibatches."
    )
    return "a drawing without data, here in words"


def _pulls(graded: bool, boxed: bool) -> Any:
    return partial(pull_figure, graded=graded, boxed=boxed)


def _table(rows: dict[str, str], *algorithms: str, each: str = "task") -> Any:
    return partial(settings, rows=rows, algorithms=algorithms, each=each)


EXHIBITS = [
    Exhibit("Figure 1", "The three modifications", _drawing),
    Exhibit("Figure 2", "Overlong filtering", partial(filtering, place=0, curves=ROLLOUTS)),
    Exhibit("Figure 3", "Critic gradients by return deviation, graded rewards", _pulls(graded=True, boxed=True)),
    Exhibit("Figure 4", "Training reward and validation by task", main_comparison),
    Exhibit("Figure 5", "Critic diagnostics on the first task", partial(critic_diagnostics, others=False)),
    Exhibit("Figure 6", "Noise normalization at two numbers of critic minibatches", normalization),
    Exhibit(
        "Seed comparison",
        "EasyPPO and PPO with the actor's filter, critic initializations",
        partial(critic_starts, algorithms=("easyppo", "ppo_actor_filter")),
    ),
    Exhibit("Figure 7", "Explained variance by critic minibatches", minibatch_sizes),
    Exhibit("Figure 8", "Critic diagnostics on the other tasks", partial(critic_diagnostics, others=True)),
    Exhibit("Figure 9", "EasyPPO's critic initializations", partial(critic_starts, algorithms=("easyppo",))),
    Exhibit("Figure 10", "Critic gradients by return deviation, two-valued rewards", _pulls(graded=False, boxed=True)),
    Exhibit("Figure 11", "Gradient and return deviation of each response, graded rewards", _pulls(graded=True, boxed=False)),
    Exhibit("Figure 12", "Gradient and return deviation of each response, two-valued rewards", _pulls(graded=False, boxed=False)),
    Exhibit(
        "Figure 13",
        "Overlong filtering on another task",
        partial(filtering, place=1, curves=(ROLLOUTS[0], ROLLOUTS[-1], VALIDATION)),
    ),
    Exhibit("Figure 14", "Validation by data source", data_sources),
    Exhibit("Table 1", "Training and evaluation", _table(TASK, "easyppo")),
    Exhibit("Table 2", "PPO and its optimizers", _table(OPTIMIZER, "easyppo")),
    Exhibit("Table 3", "Methods", _table(METHOD, *METHODS, each="method")),
    Exhibit("Table 4", "EasyPPO", _table(NORMALIZED, "easyppo")),
    Exhibit("Table 5", "HL-Gauss", _table(CATEGORICAL, "hl_gauss_ppo")),
    Exhibit("Table 6", "The filtering study and the diagnostics", _table(DIAGNOSTICS, *FILTERS, "easyppo", each="method")),
    Exhibit("Table 7", "Ablations", _table(ABLATIONS, "easyppo", "ppo_actor_filter", each="method")),
    Exhibit("Table 8", "Best validation scores, of 100", best_validation),
]
