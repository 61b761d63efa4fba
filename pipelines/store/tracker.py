"""One MLflow run per training run, resumed with it, written through an outbox."""

import logging
import math
import os
import shlex
import subprocess
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipelines.store.outbox import Outbox, masked, metric_key

RETRY_S = (1.0, 30.0)  # wait before the next look at the outbox: at first, and at most while MLflow is away
FLUSH_TIMEOUT_S = 60.0  # the end of a run waits this long for MLflow
DESCRIPTION = "mlflow.note.content"  # the tag that MLflow's pages show as a run's description


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go; `conf/config.yaml` says what each key is."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "sample_rollouts": (0, math.inf),
    }

    uri: str
    artifacts: str | None
    experiment: str
    run_name: str | None
    sample_rollouts: int
    system_metrics: bool


class Tracker:
    """Writes one MLflow run through an outbox: a thread of its own sends, so a server that is slow or away costs no step."""

    def __init__(self, config: TrackingConfig, params: dict[str, Any], tags: dict[str, str], folder: str | Path) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the thread has its own patience
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._outbox, self._uri = Outbox(folder), config.uri
        self._resumed = self._outbox.begun()
        if self._resumed:
            self._outbox.put("resume")
            if "changed" in tags:
                self.tag("changed", tags["changed"])
        else:
            where = {"uri": config.uri, "experiment": config.experiment, "artifacts": config.artifacts, "name": config.run_name}
            self._outbox.put("begin", key=uuid.uuid4().hex, tags=tags, params=flatten(params), **where)
        self._system_metrics = config.system_metrics
        self._stop, self._monitor = threading.Event(), None
        self._thread = threading.Thread(target=self._send_until_stopped, daemon=True, name="mlflow")
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run, once it has one."""
        return self._outbox.run_id()

    def metrics(self, values: dict[str, float], step: int) -> None:
        """Log a step's metrics in one batch."""
        self._outbox.put("metrics", values={metric_key(name): float(value) for name, value in values.items()}, step=step)

    def samples(self, rows: list[dict[str, Any]], step: int) -> None:
        """Append sample rollouts, as text for people, to one table of the run."""
        self._outbox.put("samples", rows=[{"step": step, **row} for row in rows])

    def tag(self, name: str, value: str) -> None:
        """Set a tag, for example where the newest checkpoint is."""
        self._outbox.put("tag", name=name, value=value)

    def finish(self, status: str) -> str | None:
        """Close the run as FINISHED or FAILED; a sentence if MLflow could not be told of everything."""
        if self._monitor is not None:
            self._monitor.finish()
        self._outbox.put("finish", status=status)
        self._stop.set()
        self._thread.join(timeout=FLUSH_TIMEOUT_S)
        if left := self._outbox.unsent():
            away = self._outbox.failure or "no answer yet"
            return (
                f"{left} records did not reach MLflow at {masked(self._uri)} ({away}); they are kept: "
                f"`python -m pipelines.tracking {self._outbox.folder}` sends them."
            )
        if self._outbox.torn:
            return f"{'; '.join(self._outbox.torn)}; the rest is in MLflow."
        if steps := self._outbox.doubled():
            return (
                f"steps {steps[0]} to {steps[-1]} were done again and are twice in MLflow; "
                f"`python -m pipelines.tracking {self._outbox.folder} --repair` writes the run with each once."
            )
        return None

    def _send_until_stopped(self) -> None:
        wait, stopping = RETRY_S[0], False
        while not stopping:
            stopping = self._stop.wait(wait)
            sent = self._outbox.send()
            if sent and self._system_metrics and self._monitor is None and not stopping:
                self._monitor = self._start_monitor()
            wait = RETRY_S[0] if sent else min(2 * wait, RETRY_S[1])

    def _start_monitor(self) -> Any:
        import mlflow
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        mlflow.set_tracking_uri(self._uri)
        monitor = SystemMetricsMonitor(self.run_id, resume_logging=self._resumed)
        monitor.start()
        return monitor


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


def description(module: str, arguments: list[str]) -> dict[str, str]:
    """The tag that shows a run's command on its page."""
    return {DESCRIPTION: f"`{masked(shlex.join(['python', '-m', module, *arguments]))}`"}
