"""Records reach MLflow in order and once, through an outbox that outlives a server that is away."""

import stat

import mlflow
import pytest

from pipelines.store import tracker as tracking
from pipelines.store.outbox import Outbox, masked
from pipelines.store.tracker import Tracker, TrackingConfig
from pipelines.tracking import main
from tests.conftest import new_store


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
    ((_, record),) = outbox._records.after(0)
    assert str(record["values"]["x"]) == str(value)


def begun(folder, artifacts=None):
    """An outbox with a run that MLflow knows."""
    outbox = Outbox(folder)
    uri = new_store(folder)
    outbox.put("begin", uri=uri, experiment="test", artifacts=artifacts, name="name", tags={}, params={"uri": SECRET}, key="k")
    return uri, outbox


SECRET = "https://me:hunter2@host/db?api_key=hunter3&x=1"


def steps_of(uri, name="loss"):
    client, run = run_of(uri)
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]


def test_a_torn_record_is_skipped_and_named_and_the_next_is_whole(tmp_path):
    uri, outbox = begun(tmp_path)
    outbox.put("metrics", values={"loss": 1.0}, step=1)
    with open(tmp_path / "mlflow.jsonl", "a") as stream:
        stream.write('{"kind": "metrics", "values": {"loss"')
    again = Outbox(tmp_path)
    again.put("metrics", values={"loss": 3.0}, step=3)
    assert again.send()
    assert steps_of(uri) == [(1, 1.0), (3, 3.0)]
    (note,) = again.torn
    assert "cut short, skipped" in note


@pytest.mark.parametrize("mark", ["", "12x", "99999999", "-3", "\0"])
def test_a_lost_mark_is_rebuilt_and_nothing_is_sent_twice(tmp_path, mark):
    uri, outbox = begun(tmp_path)
    for step in (1, 2):
        outbox.put("metrics", values={"loss": float(step)}, step=step)
    assert outbox.send()
    outbox.put("metrics", values={"loss": 3.0}, step=3)
    (tmp_path / "mlflow.sent").write_text(mark)
    assert Outbox(tmp_path).send()
    assert steps_of(uri) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_artifacts_that_cannot_be_stored_hold_nothing_back(tmp_path, monkeypatch):
    uri, outbox = begun(tmp_path, str(tmp_path / "artifacts"))
    outbox.put("samples", rows=[{"step": 1, "response": "r"}])
    outbox.put("metrics", values={"loss": 1.0}, step=1)
    with monkeypatch.context() as away:
        away.setattr(mlflow.MlflowClient, "log_table", lambda *_: (_ for _ in ()).throw(OSError("no space in the store")))
        assert not outbox.send()
        assert "no space in the store" in outbox.failure
        assert (steps_of(uri), outbox.unsent()) == ([(1, 1.0)], 1)
    assert outbox.send()
    assert outbox.unsent() == 0


def test_a_run_with_steps_done_again_is_repaired(tmp_path, capsys):
    uri, outbox = begun(tmp_path)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5)):
        outbox.put("metrics", values={"loss": loss, "training/global_step": float(step)}, step=step)
    outbox.put("finish", status="FINISHED")
    assert main(str(tmp_path)) == 0
    assert "steps 2 to 3 were done again" in capsys.readouterr().out
    old = outbox.run_id()
    assert main(str(tmp_path), repair=True) == 0
    assert steps_of(uri) == [(1, 1.0), (2, 2.5), (3, 3.5)]
    _, run = run_of(uri)
    assert (run.info.run_id != old, run.info.run_name, run.info.status) == (True, "name", "FINISHED")


def test_secrets_are_in_no_text_for_people_and_in_no_file_for_others(tmp_path):
    uri, outbox = begun(tmp_path)
    assert outbox.send()
    assert run_of(uri)[1].data.params["uri"] == "https://***@host/db?api_key=***&x=1"
    assert masked("postgresql://token@host") == "postgresql://***@host"
    assert masked("sqlite:////a/b.db and s3://bucket/key") == "sqlite:////a/b.db and s3://bucket/key"
    files = [file for file in tmp_path.iterdir() if file.name.startswith("mlflow.") and file.suffix != ".db"]
    assert len(files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
