"""Runs as a report sees them: read from MLflow, seeds of one configuration together."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlflow
import numpy as np

# Parameters in which runs of one configuration may differ: seeds, also of the value model's start (EasyPPO section 10.3).
CRITIC_START = ("algorithm.critic.head_seed", "algorithm.critic.path")
INCIDENTAL = ("seed", "output_dir", "resume", "tracking.", "cluster.", "replay_buffer.url", "scale.critic_head_seed", *CRITIC_START)
MAX_PARAM_CHARACTERS = 250


class ReportError(ValueError):
    """What was asked for cannot be reported."""


@dataclass(frozen=True)
class Run:
    """One MLflow run with the history of its metrics, by step."""

    run_id: str
    name: str
    params: dict[str, str]
    metrics: dict[str, dict[int, float]]

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric; empty where it was never logged."""
        history = self.metrics.get(metric, {})
        steps = np.array(sorted(history), int)
        return steps, np.array([history[step] for step in steps.tolist()], float)

    def score_metric(self) -> str | None:
        """Its validation mean@n, the equal mean over data sources."""
        return next((name for name in sorted(self.metrics) if re.fullmatch(r"val-core/mean/acc/mean_at_\d+", name)), None)

    def sources(self) -> list[str]:
        """The data sources of its validation problems."""
        found = (re.fullmatch(r"val-core/(.*)/acc/mean_at_\d+", name) for name in self.metrics)
        return sorted(match[1] for match in found if match and match[1] != "mean")


@dataclass
class Configuration:
    """Runs that differ in nothing but their seed, and the evaluations that all of them have."""

    label: str
    runs: list[Run]

    @property
    def algorithm(self) -> str:
        """The algorithm that the runs name."""
        return self.runs[0].params.get("algorithm.name", "")

    @property
    def task(self) -> str:
        """The task that the runs name."""
        return self.runs[0].params.get("task.name", "")

    def logged(self, metric: str) -> bool:
        """Whether any of its runs has the metric."""
        return any(run.metrics.get(metric) for run in self.runs)

    def critic_initializations(self) -> set[tuple[str | None, ...]]:
        """What its runs' value models began with, where they have one: seed of the head, and folder."""
        return {tuple(map(run.params.get, CRITIC_START)) for run in self.runs if run.metrics.get("critic/vf_explained_var")}

    def evaluations(self) -> np.ndarray:
        """Steps at which every run was evaluated."""
        steps = [set(run.series(metric)[0].tolist()) for run in self.runs if (metric := run.score_metric())]
        return np.array(sorted(set.intersection(*steps)) if len(steps) == len(self.runs) else [], int)

    def at_evaluations(self, metric: str | None = None) -> np.ndarray:
        """A metric (the score unless another is named) at the common evaluations, [runs, evaluations]."""
        steps = self.evaluations().tolist()
        names = [metric or run.score_metric() or "" for run in self.runs]
        return np.array(
            [[run.metrics.get(name, {}).get(step, np.nan) for step in steps] for run, name in zip(self.runs, names, strict=True)]
        )

    def flops(self) -> np.ndarray:
        """Decoding FLOPs spent up to each common evaluation, [runs, evaluations]."""
        return self.at_evaluations("decode/flops_total")


def read_runs(uri: str, experiment: str | None, run_ids: Sequence[str]) -> list[Run]:
    """The finished runs of an experiment, or the runs named; ReportError if there are none."""
    client = mlflow.MlflowClient(uri)
    if run_ids:
        found = [client.get_run(run_id) for run_id in run_ids]
    else:
        known = client.get_experiment_by_name(experiment or "")
        if known is None:
            names = ", ".join(one.name for one in client.search_experiments())
            raise ReportError(f"experiment={experiment}: not in {uri}, which has {names}.")
        found = [run for run in client.search_runs([known.experiment_id]) if run.info.status == "FINISHED"]
    if not found:
        raise ReportError(f"experiment={experiment}: no finished run in {uri}.")
    return [_read(client, run) for run in sorted(found, key=lambda run: run.info.start_time)]


def _read(client: mlflow.MlflowClient, run: Any) -> Run:
    names = [name for name in run.data.metrics if not name.startswith("system/")]
    metrics = {name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} for name in names}
    return Run(run.info.run_id, run.info.run_name, dict(run.data.params), metrics)


def configurations(runs: Sequence[Run]) -> list[Configuration]:
    """Runs grouped by what they were told, seeds together, in the order of their first run.

    The label is the algorithm's name, with the parameters in which it differs from the others.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        key = tuple(sorted((name, value) for name, value in run.params.items() if not name.startswith(INCIDENTAL)))
        groups.setdefault(key, []).append(run)
    found = [dict(key) for key in groups]
    return [Configuration(label(own, found), members) for own, members in zip(found, groups.values(), strict=True)]


def configurations_by_task(runs: Sequence[Run]) -> dict[str, list[Configuration]]:
    """The configurations of each task by themselves, labelled by what differs there; tasks in the order of their first run."""
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        tasks.setdefault(run.params.get("task.name", ""), []).append(run)
    return {task: configurations(members) for task, members in tasks.items()}


def label(own: dict[str, str], among: Sequence[dict[str, str]]) -> str:
    """The algorithm's name, and the parameters that others have otherwise: `ac2 chunk_tokens=16 steps=60`.

    Parameters of the algorithm itself are compared among the configurations of that algorithm alone; the rest among all of them.
    """
    algorithm = own.get("algorithm.name", "run")
    siblings = [one for one in among if one.get("algorithm.name", "run") == algorithm]
    differing = []
    for name in sorted(set().union(*siblings)):
        others = siblings if name.startswith("algorithm.") else among
        if any(one.get(name) != own.get(name) for one in others):
            differing.append(name)
    return " ".join([algorithm, *(f"{_shortest(name, differing)}={own.get(name, 'none')}" for name in differing)])


def _shortest(name: str, among: Sequence[str]) -> str:
    """The last parts of a parameter's name, as few as tell it from the others."""
    parts = name.split(".")
    tails = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
    return next(tail for tail in tails if sum(f".{one}".endswith(f".{tail}") for one in among) == 1)
