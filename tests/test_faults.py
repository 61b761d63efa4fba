"""Parts of whole training runs that are killed, for real: the run goes on, no row is lost or counted twice."""

import itertools
import os
import signal
import subprocess
import sys
import time

import mlflow
import psutil
import pyarrow.parquet as pq
import pytest
import ray
from ray import serve
from reasoning_gym import create_dataset

from serve.judge import APP_NAME, DEPLOYMENT
from tests.commands import DEADLINE_S, ONE_ENGINE, SMALL, command
from tests.distributed import free_port
from tests.hostile.test_answers import ENDLESS, PAYLOADS

pytestmark = pytest.mark.faults


def processes(root, name):
    """Processes below `root` whose title says that they are a part of Ray by this name."""
    return [p for p in psutil.Process(root).children(recursive=True) if any(name in part for part in p.cmdline())]


class Run:
    """A training run that the test watches and damages."""

    def __init__(self, workspace, *arguments):
        self.output, self.log = workspace / "out", workspace / "log"
        with open(self.log, "w") as stream:
            self.process = subprocess.Popen(
                command("pipelines.train", *SMALL, f"output_dir={self.output}", *arguments), stdout=stream, stderr=stream
            )

    def wait_for_step(self, step):
        deadline = time.monotonic() + DEADLINE_S
        while not (self.output / "rollouts" / f"step_{step:06d}.parquet").exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def kill_one(self, name):
        victim = processes(self.process.pid, name)[0]
        victim.kill()


def test_judge_engine_and_rank_are_killed_while_mlflow_is_away_and_the_run_ends_well(tmp_path):
    ray.shutdown()
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    run = Run(tmp_path, "steps=8", f"tracking.uri={uri}", "tracking.artifacts=null", "evaluation.every=0")
    run.wait_for_step(1)
    run.kill_one("ServeReplica")
    run.wait_for_step(2)
    run.kill_one("Engine")
    run.wait_for_step(4)
    run.kill_one("RayTrainWorker")
    assert run.process.wait(timeout=2 * DEADLINE_S) == 0, run.log.read_text()
    for step in range(1, 9):
        table = pq.read_table(run.output / "rollouts" / f"step_{step:06d}.parquet")
        assert table.num_rows == 8
        assert all(reward is not None for group in table["reward"].to_pylist() for reward in group)
        assert set(table["policy_version"].to_pylist()) == {step - 1}
    told = run.log.read_text()
    assert "records did not reach MLflow" in told
    assert "trainer restarted 1 x" in told
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        send_when_back(run.output)
        client = mlflow.MlflowClient(uri)
        (found,) = client.search_runs([client.get_experiment_by_name("chain_arithmetic").experiment_id])
        steps = {m.step for m in client.get_metric_history(found.info.run_id, "actor/pg_loss")}
        assert steps == set(range(1, 9))
        assert found.data.metrics["engine/restarts"] == 1
        assert found.data.metrics["training/restarts"] == 1
        assert found.info.status == "FINISHED"
    finally:
        os.killpg(server.pid, signal.SIGKILL)


def send_when_back(output):
    """The one command, tried until the server is up."""
    deadline = time.monotonic() + 120
    while subprocess.run([sys.executable, "-m", "pipelines.tracking", str(output)], capture_output=True).returncode:
        assert time.monotonic() < deadline
        time.sleep(2)


def test_an_error_in_what_the_run_was_told_ends_it_with_its_reason(tmp_path):
    ray.shutdown()
    reward = tmp_path / "mine.py"
    reward.write_text("def broken(data_source, solution_str, ground_truth, extra_info):\n    raise KeyError('no such rubric')\n")
    run = Run(
        tmp_path,
        "steps=2",
        f"reward.path={reward}",
        "reward.name=broken",
        "evaluation.every=0",
        f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    )
    assert run.process.wait(timeout=DEADLINE_S) == 1
    told = run.log.read_text()
    assert "step 1: 100% of the responses got no reward, more than max_missing_reward=50%" in told
    assert "KeyError: 'no such rubric'" in told


def test_a_killed_coordinator_is_said_in_a_sentence_and_the_run_goes_on_when_it_is_resumed(tmp_path):
    ray.shutdown()
    own = ["steps=4", "checkpoint.every=1", "evaluation.every=0", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    run = Run(tmp_path, *own)
    run.wait_for_step(2)
    run.kill_one("Coordinator")
    assert run.process.wait(timeout=DEADLINE_S) == 1
    told = run.log.read_text()
    assert "the coordinator died" in told
    assert f"resume={run.output} goes on from the newest checkpoint" in told
    again = subprocess.run(command("pipelines.train", f"resume={run.output}"), capture_output=True, text=True, timeout=DEADLINE_S)
    assert again.returncode == 0, again.stderr


def test_a_serve_controller_that_dies_costs_no_reward(tmp_path):
    ray.shutdown()
    run = Run(tmp_path, "steps=5", "evaluation.every=0", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
    run.wait_for_step(2)
    run.kill_one("ServeController")
    assert run.process.wait(timeout=DEADLINE_S) == 0, run.log.read_text()
    for step in range(1, 6):
        table = pq.read_table(run.output / "rollouts" / f"step_{step:06d}.parquet")
        assert all(reward is not None for group in table["reward"].to_pylist() for reward in group)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small disk takes root")
def test_a_full_disk_ends_a_run_with_a_sentence_and_it_is_resumed(tmp_path):
    ray.shutdown()
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=28m", "tmpfs", str(disk)], check=True)
    try:
        own = ["steps=4", "checkpoint.every=1", "evaluation.every=0", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
        log = tmp_path / "log"
        with open(log, "w") as stream:
            full = command("pipelines.train", *SMALL, *own, f"output_dir={disk}/out", "cluster.learner.max_restarts=0")
            assert subprocess.run(full, stdout=stream, stderr=stream, timeout=DEADLINE_S).returncode == 1
        assert "No space left on device" in log.read_text() or "file write failed" in log.read_text(), log.read_text()
        assert "Traceback" not in log.read_text()
        subprocess.run(["mount", "-o", "remount,size=400m", str(disk)], check=True)
        resume = command("pipelines.train", f"resume={disk}/out")
        again = subprocess.run(resume, capture_output=True, text=True, timeout=DEADLINE_S)
        assert again.returncode == 0, again.stderr
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_hostile_responses_beside_a_run_lose_no_good_verdict_of_either(joined, tmp_path):
    """A thousand of them, in the judge that the run itself asks; the run's own rewards and the good ones between them all come."""
    entry = create_dataset("countdown", size=1, seed=1)[0]
    run = Run(tmp_path, "steps=6", "evaluation.every=0", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", ONE_ENGINE)
    run.wait_for_step(1)
    hostile = [("math", text) for _, _, text in list(ENDLESS.values())[:8]]
    hostile += [("reasoning_gym/countdown", f"<answer>{payload}</answer>") for payload in PAYLOADS.values()]
    good = [
        ("math", "\\boxed{33}"),
        ("chain_arithmetic", "#33"),
        ("reasoning_gym/countdown", f"<answer>{entry['answer']}</answer>"),
    ]
    texts = list(itertools.islice(itertools.cycle(hostile), 1000))
    for i in range(99):
        texts.insert(11 * i, good[i % 3])
    items = [
        {"data_source": source, "response": text, "ground_truth": "33", "extra_info": {"entry": entry}} for source, text in texts
    ]
    judge = serve.get_deployment_handle(DEPLOYMENT, app_name=APP_NAME)
    verdicts = judge.score_batch.remote(items, deadline_s=300).result(timeout_s=330)
    assert [verdicts[11 * i] for i in range(99)] == [{"reward": 1.0, "acc": 1.0, "status": "ok"}] * 99
    assert run.process.wait(timeout=DEADLINE_S) == 0, run.log.read_text()
    for step in range(1, 7):
        table = pq.read_table(run.output / "rollouts" / f"step_{step:06d}.parquet")
        assert all(reward is not None for group in table["reward"].to_pylist() for reward in group)
