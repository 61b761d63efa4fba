"""MLflow: one run per training run, resumed with it, and nothing lost while the server is away.

`python -m pipelines.store.tracker outputs/RUN` sends what a run could not.
"""

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNSAFE = re.compile(r"[^\w/.\- ]")
PARAMS_PER_CALL, PARAM_LENGTH, METRICS_PER_CALL = 100, 500, 1000
RETRY_S = (1.0, 30.0)  # between looks at the outbox: at first, and at most while MLflow is away
FLUSH_TIMEOUT_S = 60.0  # that the end of a run waits for MLflow
RUN_KEY = "run_key"  # tag by which a run is found again, should its creation have been cut short


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


class Outbox:
    """A run's records for MLflow in a file, and how many of them MLflow has; any process can send the rest later."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.failure = ""  # why the last attempt to send ended early
        self._lock = threading.Lock()
        self._records, self._mark, self._run = (self.folder / f"mlflow.{name}" for name in ("jsonl", "sent", "run"))

    def begun(self) -> bool:
        """Whether there is a run to go on with."""
        return self._records.exists() and self._records.stat().st_size > 0

    def put(self, kind: str, **record: Any) -> None:
        """Append a record; it is on disk when this returns."""
        line = json.dumps({"kind": kind, "time": int(time.time() * 1000), **record}, default=str)
        with self._lock, open(self._records, "a") as stream:
            print(line, file=stream)

    def unsent(self) -> int:
        """How many records MLflow does not have."""
        return len(self._after(self._sent()))

    def run_id(self) -> str | None:
        """MLflow's id of the run, once it has one."""
        return self._run.read_text() if self._run.exists() else None

    def send(self) -> bool:
        """Send what is there, in its order; False if MLflow did not take all of it (`failure` says why)."""
        try:
            at = self._sent()
            for line in self._after(at):
                self._deliver(json.loads(line))
                at += len(line)
                self._mark.write_text(str(at))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            return False
        return True

    def _deliver(self, record: dict[str, Any]) -> None:
        import pandas as pd
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        with open(self._records, "rb") as stream:
            client = MlflowClient(tracking_uri=json.loads(stream.readline())["uri"])
        kind = record["kind"]
        if kind == "begin":
            run = _find_or_create(client, record)
            self._run.write_text(run)
            params = [Param(metric_key(name), str(value)[:PARAM_LENGTH]) for name, value in record["params"].items()]
            for i in range(0, len(params), PARAMS_PER_CALL):
                client.log_batch(run, params=params[i : i + PARAMS_PER_CALL])
            return
        run = self._run.read_text()
        if kind == "resume":
            client.update_run(run, status="RUNNING")
        elif kind == "metrics":
            metrics = [Metric(name, value, record["time"], record["step"]) for name, value in record["values"].items()]
            for i in range(0, len(metrics), METRICS_PER_CALL):
                client.log_batch(run, metrics=metrics[i : i + METRICS_PER_CALL])
        elif kind == "samples":
            client.log_table(run, pd.DataFrame(record["rows"]), "sample_rollouts.json")
        elif kind == "artifact":
            client.log_artifact(run, record["path"], record["folder"])
        elif kind == "tag":
            client.set_tag(run, record["name"], record["value"])
        elif kind == "finish":
            client.set_terminated(run, record["status"], record["time"])

    def _after(self, position: int) -> list[bytes]:
        """The records behind a position in the file."""
        if not self._records.exists():
            return []
        with self._lock, open(self._records, "rb") as stream:
            stream.seek(position)
            return stream.readlines()

    def _sent(self) -> int:
        return int(self._mark.read_text()) if self._mark.exists() else 0


def _find_or_create(client: Any, record: dict[str, Any]) -> str:
    experiment = client.get_experiment_by_name(record["experiment"])
    if experiment is None:
        where = client.create_experiment(record["experiment"], artifact_location=record["artifacts"])
    else:
        where = experiment.experiment_id
        found = client.search_runs([where], f"tags.{RUN_KEY} = '{record['key']}'")
        if found:
            return found[0].info.run_id
    tags = record["tags"] | {RUN_KEY: record["key"]}
    return client.create_run(where, run_name=record["name"], tags=tags, start_time=record["time"]).info.run_id


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

    def artifact(self, path: str, folder: str | None = None) -> None:
        """Keep a file with the run."""
        self._outbox.put("artifact", path=path, folder=folder)

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
            return (
                f"{left} records did not reach MLflow at {self._uri} ({self._outbox.failure or 'no answer yet'}); they are kept: "
                f"`python -m pipelines.store.tracker {self._outbox.folder}` sends them."
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


def main(folder: str) -> int:
    """Send what a run could not."""
    outbox = Outbox(folder)
    if not outbox.begun():
        print(f"error: {folder}: no run there (mlflow.jsonl is missing).", file=sys.stderr)
        return 2
    before, sent = outbox.unsent(), outbox.send()
    print(f"{before - outbox.unsent()} of {before} records sent, MLflow run {outbox.run_id()}")
    if not sent:
        print(f"error: MLflow did not take the rest ({outbox.failure}).", file=sys.stderr)
    return 0 if sent else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pipelines.store.tracker outputs/RUN")
    sys.exit(main(sys.argv[1]))
