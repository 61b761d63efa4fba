"""Records reach MLflow in order and once, through an outbox that outlives a server that is away."""

import json

import mlflow
import pytest

from pipelines.store import tracker as tracking
from pipelines.store.outbox import Outbox
from pipelines.store.tracker import Tracker, TrackingConfig
from pipelines.tracking import main


def config(uri, tmp_path):
    return TrackingConfig(uri, str(tmp_path / "artifacts"), "test", "name", 2, False)


def run_of(uri):
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    return client, run


def test_everything_arrives_in_one_run(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = Tracker(config(uri, tmp_path), {"a": {"b": 1}}, {"tag": "x"}, tmp_path / "run")
    tracker.metrics({"loss@1": 0.5}, 1)
    tracker.samples([{"response": "r"}], 1)
    tracker.tag("checkpoint", "c")
    assert tracker.finish("FINISHED") is None
    client, run = run_of(uri)
    assert (run.info.run_id, run.info.status, run.info.run_name) == (tracker.run_id, "FINISHED", "name")
    assert run.data.params == {"a.b": "1"}
    assert run.data.metrics == {"loss_at_1": 0.5}
    assert run.data.tags["checkpoint"] == "c"
    assert [a.path for a in client.list_artifacts(run.info.run_id)] == ["sample_rollouts.json"]


def test_a_second_start_in_the_same_folder_goes_on_with_the_run(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for step in (1, 2):
        tracker = Tracker(config(uri, tmp_path), {}, {}, tmp_path / "run")
        tracker.metrics({"loss": float(step)}, step)
        tracker.finish("FINISHED")
    client, run = run_of(uri)
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [1, 2]


def test_a_server_that_is_away_for_the_whole_run_gets_everything_by_one_command(tmp_path, monkeypatch, capsys):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setattr(tracking, "FLUSH_TIMEOUT_S", 1.0)

    def away(self, record):
        raise ConnectionError("no route to the server")

    with monkeypatch.context() as gone:
        gone.setattr(Outbox, "_deliver", away)
        tracker = Tracker(config(uri, tmp_path), {"a": 1}, {}, tmp_path / "run")
        tracker.metrics({"loss": 1.0}, 1)
        told = tracker.finish("FINISHED")
    assert tracker.run_id is None
    assert "3 records did not reach MLflow" in told
    assert "no route to the server" in told
    assert f"python -m pipelines.tracking {tmp_path / 'run'}" in told
    assert main(str(tmp_path / "run")) == 0
    assert "3 of 3 records sent" in capsys.readouterr().out
    client, run = run_of(uri)
    assert (run.data.metrics, run.info.status) == ({"loss": 1.0}, "FINISHED")
    assert main(str(tmp_path / "run")) == 0  # nothing is sent twice
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 1


def test_a_run_cut_short_while_it_was_created_is_found_again(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    outbox = Outbox(tmp_path)
    begin = {"uri": uri, "experiment": "test", "artifacts": None, "name": None, "tags": {}, "params": {}, "key": "k"}
    outbox.put("begin", **begin)
    assert outbox.send()
    (tmp_path / "mlflow.sent").unlink()
    (tmp_path / "mlflow.run").unlink()
    again = Outbox(tmp_path)
    assert again.send()
    assert run_of(uri)[1].info.run_id == again.run_id()


def test_a_folder_without_a_run(tmp_path, capsys):
    assert main(str(tmp_path)) == 2
    assert "no run there" in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unusual_numbers_survive_the_file(tmp_path, value):
    outbox = Outbox(tmp_path)
    outbox.put("metrics", values={"x": value}, step=1)
    (line,) = outbox._after(0)
    assert str(json.loads(line)["values"]["x"]) == str(value)
