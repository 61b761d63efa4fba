"""What a run has for MLflow, in a file first: nothing is lost while the server is away, and any process can send the rest later."""

import hashlib
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pipelines.store.journal import Journal

_UNSAFE = re.compile(r"[^a-zA-Z0-9_/.\- ]")
# A password in a URL, and what follows the names that secrets have in queries.
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*(?=@)")
_QUERY = re.compile(r"(?<=[?&])(\w*(?:token|key|secret|password|sig)=)[^&\s]+", re.I)
KEY_LENGTH = 250
PARAMS_PER_CALL, PARAM_LENGTH, METRICS_PER_CALL = 100, 500, 1000
STEP = "training/global_step"  # every training step logs it, once
RUN_KEY = "run_key"  # tag by which a run is found again, should its creation have been cut short
# Without it MLflow may open an experiment's page as an evaluation of a GenAI application.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}


def metric_key(name: str) -> str:
    """A metric name MLflow accepts: `@` becomes `_at_`, anything else unusual an underscore, and so an empty part of the path.

    What is longer than MLflow takes ends in a digest of the whole.
    """
    parts = _UNSAFE.sub("_", name.replace("@", "_at_")).split("/")
    key = "/".join("_" * max(len(part), 1) if not part.strip(".") else part for part in parts)
    if len(key) <= KEY_LENGTH:
        return key
    return f"{key[: KEY_LENGTH - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def masked(text: str) -> str:
    """Text for people, without the passwords and tokens of its URLs."""
    return _QUERY.sub(r"\1***", _PASSWORD.sub("***", text))


class Outbox:
    """A run's records for MLflow, and how many of them MLflow has. Artifacts wait apart: their store may be away alone."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.failure = ""  # why the last attempt to send ended early
        self._records = Journal(self.folder / "mlflow.jsonl", self.folder / "mlflow.sent")
        self._artifacts = Journal(self.folder / "mlflow.artifacts.jsonl", self.folder / "mlflow.artifacts.sent")
        self._run = self.folder / "mlflow.run"
        self._uri: str | None = None

    @property
    def torn(self) -> list[str]:
        """Records that were cut short, by place."""
        return self._records.torn + self._artifacts.torn

    def begun(self) -> bool:
        """Whether there is a run to go on with."""
        return self._records.begun()

    def put(self, kind: str, **record: Any) -> None:
        """Append a record; it is in the file when this returns."""
        journal = self._artifacts if kind == "samples" else self._records
        journal.append({"kind": kind, "time": int(time.time() * 1000), **record})

    def unsent(self) -> int:
        """How many records MLflow does not have."""
        return sum(1 for journal in (self._records, self._artifacts) for _ in journal.after(journal.marked() or 0))

    def run_id(self) -> str | None:
        """MLflow's id of the run, once it has one."""
        return (self._run.read_text().strip() or None) if self._run.exists() else None

    def send(self) -> bool:
        """Send what is there, in its order; False if MLflow did not take all of it (`failure` says why)."""
        self.failure = ""
        for journal in (self._records, self._artifacts):
            try:
                at = journal.marked()
                for position, record in journal.after(self._rebuilt(journal) if at is None else at):
                    self._deliver(record)
                    journal.set_mark(position)
            except Exception as error:
                reason = str(error).splitlines()[0][:200] if str(error) else ""
                self.failure = self.failure or masked(f"{type(error).__name__}: {reason}")
        return not self.failure

    def _client(self) -> Any:
        from mlflow import MlflowClient

        if self._uri is None:
            _, first = next(self._records.after(0))
            self._uri = first["uri"]
        return MlflowClient(tracking_uri=self._uri)

    def _rebuilt(self, journal: Journal) -> int:
        """A mark that was lost: behind the last metrics that MLflow has; what comes before them was sent in its order."""
        if journal is not self._records or self.run_id() is None:
            return 0
        client, position, known = self._client(), 0, dict[str, set[tuple[int, int]]]()
        for after, record in journal.after(0):
            if record["kind"] == "metrics" and record["values"]:
                name = next(iter(record["values"]))
                if name not in known:
                    known[name] = {(one.step, one.timestamp) for one in client.get_metric_history(self.run_id(), name)}
                position = after if (record["step"], record["time"]) in known[name] else position
        return position

    def _deliver(self, record: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        client, kind = self._client(), record["kind"]
        if kind == "begin":
            self._begin(client, record)
            return
        run = self.run_id()
        if run is None:
            raise RuntimeError("the run has no id yet")
        if kind == "resume":
            client.update_run(run, status="RUNNING")
        elif kind == "metrics":
            metrics = [Metric(name, value, record["time"], record["step"]) for name, value in record["values"].items()]
            for i in range(0, len(metrics), METRICS_PER_CALL):
                client.log_batch(run, metrics=metrics[i : i + METRICS_PER_CALL])
        elif kind == "samples":
            import pandas as pd

            client.log_table(run, pd.DataFrame(record["rows"]), "sample_rollouts.json")
        elif kind == "tag":
            client.set_tag(run, record["name"], record["value"])
        elif kind == "finish":
            client.set_terminated(run, record["status"], record["time"])

    def _begin(self, client: Any, record: dict[str, Any]) -> None:
        from mlflow.entities import Param

        run = _find_or_create(client, record)
        self._run.write_text(run)
        self._run.chmod(0o600)
        params = [Param(metric_key(name), masked(str(value))[:PARAM_LENGTH]) for name, value in record["params"].items()]
        for i in range(0, len(params), PARAMS_PER_CALL):
            client.log_batch(run, params=params[i : i + PARAMS_PER_CALL])

    def doubled(self) -> list[int]:
        """Steps whose metrics were logged more than once, as they were done again from a checkpoint."""
        records = [record for _, record in self._records.after(0) if record["kind"] == "metrics"]
        counts = Counter(record["step"] for record in records if STEP in record["values"])
        return sorted(step for step, count in counts.items() if count > 1)

    def repair(self) -> str | None:
        """Write the run anew, each step once with its last values, and delete the old one; its id, or None if MLflow was away.

        MLflow takes no value back, so a step that was done again has two.
        """
        client, old, records = self._client(), self.run_id(), [record for _, record in self._records.after(0)]
        last = {(name, one["step"]): i for i, one in enumerate(records) if one["kind"] == "metrics" for name in one["values"]}
        try:
            self._begin(client, records[0] | {"key": f"{records[0]['key']}-{int(time.time())}"})
            for i, record in enumerate(records[1:], 1):
                if record["kind"] == "metrics":
                    values = {name: value for name, value in record["values"].items() if last[name, record["step"]] == i}
                    record = record | {"values": values}
                self._deliver(record)
            for _, record in self._artifacts.after(0):
                self._deliver(record)
        except Exception as error:
            self.failure = masked(f"{type(error).__name__}: {str(error)[:200]}")
            if old is not None:
                self._run.write_text(old)
            return None
        if old is not None:
            client.delete_run(old)
        return self.run_id()


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
