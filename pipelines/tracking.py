"""MLflow: one run per training run, resumed with it."""

import logging
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNSAFE = re.compile(r"[^\w/.\- ]")
PARAMS_PER_CALL, PARAM_LENGTH = 100, 500


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go."""

    uri: str  # any MLflow tracking URI; the default is a SQLite file
    artifacts: str | None  # artifact location of a new experiment
    experiment: str
    run_name: str | None
    sample_rollouts: int  # responses kept in a table at each evaluation
    system_metrics: bool


def metric_key(name: str) -> str:
    """A metric name MLflow accepts: `@` becomes `_at_`, anything else unusual an underscore."""
    return _UNSAFE.sub("_", name.replace("@", "_at_"))


class Tracker:
    """Writes one MLflow run; every call names the step."""

    def __init__(self, config: TrackingConfig, run_id: str | None, params: dict[str, Any], tags: dict[str, str]) -> None:
        # MLflow loads with the tracker: settings are read in processes that have no use for it.
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._config = config
        self._client = mlflow.MlflowClient(tracking_uri=config.uri)
        mlflow.set_tracking_uri(config.uri)
        if run_id is None:
            run = self._client.create_run(self._experiment(), run_name=config.run_name, tags=tags)
            self.run_id = run.info.run_id
            self._log_params(params)
        else:
            self.run_id = self._client.get_run(run_id).info.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        self._monitor = None
        if config.system_metrics:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=run_id is not None)
            self._monitor.start()

    def metrics(self, values: dict[str, float], step: int) -> None:
        """Log a step's metrics in one batch."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entities = [Metric(metric_key(name), float(value), now, step) for name, value in values.items()]
        for i in range(0, len(entities), 1000):
            self._client.log_batch(self.run_id, metrics=entities[i : i + 1000])

    def samples(self, rows: list[dict[str, Any]], step: int) -> None:
        """Append sample rollouts, as text for people, to one table of the run."""
        import pandas as pd

        table = pd.DataFrame([{"step": step, **row} for row in rows])
        self._client.log_table(self.run_id, table, "sample_rollouts.json")

    def artifact(self, path: str, folder: str | None = None) -> None:
        """Keep a file with the run."""
        self._client.log_artifact(self.run_id, path, folder)

    def tag(self, name: str, value: str) -> None:
        """Set a tag, for example where the newest checkpoint is."""
        self._client.set_tag(self.run_id, name, value)

    def finish(self, status: str) -> None:
        """Close the run as FINISHED or FAILED."""
        if self._monitor is not None:
            self._monitor.finish()
        self._client.set_terminated(self.run_id, status)

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._config.experiment)
        if found is not None:
            return found.experiment_id
        return self._client.create_experiment(self._config.experiment, artifact_location=self._config.artifacts)

    def _log_params(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        entities = [Param(metric_key(name), str(value)[:PARAM_LENGTH]) for name, value in flatten(params).items()]
        for i in range(0, len(entities), PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=entities[i : i + PARAMS_PER_CALL])


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configuration as dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def git_sha() -> str:
    """The commit of the code, or "unknown" outside a checkout."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
