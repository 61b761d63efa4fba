"""What a run has for MLflow, in a file first: nothing is lost while the server is away, and any process can send the rest later."""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

_UNSAFE = re.compile(r"[^\w/.\- ]")
PARAMS_PER_CALL, PARAM_LENGTH, METRICS_PER_CALL = 100, 500, 1000
RUN_KEY = "run_key"  # tag by which a run is found again, should its creation have been cut short
# Without it MLflow may open an experiment's page as an evaluation of a GenAI application.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}


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
        where = client.create_experiment(record["experiment"], artifact_location=record["artifacts"], tags=EXPERIMENT_TAGS)
    else:
        where = experiment.experiment_id
        found = client.search_runs([where], f"tags.{RUN_KEY} = '{record['key']}'")
        if found:
            return found[0].info.run_id
    tags = record["tags"] | {RUN_KEY: record["key"]}
    return client.create_run(where, run_name=record["name"], tags=tags, start_time=record["time"]).info.run_id
