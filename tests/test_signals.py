"""Runs that are told to end: their step is finished, a checkpoint is there, MLflow knows, and the exit status says why."""

import os
import signal
import subprocess
import time
from pathlib import Path

import mlflow
import pytest

from pipelines.store import checkpoint
from tests.commands import DEADLINE_S, ONE_ENGINE, SMALL, alone, command

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class Run:
    """A command in a process group of its own, as a shell or a supervisor starts it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output, self.log = folder / "out", folder / "log"
        own = [*SMALL, ONE_ENGINE, "evaluation.every=0", "checkpoint.every=0", f"tracking.uri=sqlite:///{folder}/mlflow.db"]
        own += [f"tracking.artifacts={folder}/artifacts", "steps=500"]
        with open(self.log, "w") as stream:
            self.process = subprocess.Popen(
                command("pipelines.train", *arguments, *own), stdout=stream, stderr=stream, env=alone(), start_new_session=True
            )

    def wait_for_step(self, step: int, output: Path) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not (output / f"rollouts/step_{step:06d}.parquet").exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def end(self) -> int:
        """The exit status, and nothing of the run is left."""
        status = self.process.wait(timeout=DEADLINE_S)
        deadline = time.monotonic() + 60
        while left := subprocess.run(["pgrep", "-f", str(self.output)], capture_output=True, text=True).stdout.split():
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
        return status


def status_in_mlflow(folder: Path) -> str:
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("chain_arithmetic").experiment_id])
    return run.info.status


def test_sigterm_ends_a_run_in_good_order(tmp_path):
    run = Run(tmp_path, f"output_dir={tmp_path}/out")
    run.wait_for_step(2, run.output)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143, run.log.read_text()
    told = run.log.read_text()
    assert "stopped by SIGTERM" in told
    assert "Traceback" not in told
    assert "*** SIG" not in told
    (path,) = checkpoint.complete(str(run.output))
    step = checkpoint.read_manifest(path)["step"]
    assert step >= 2
    assert (run.output / f"rollouts/step_{step:06d}.parquet").exists()
    assert not (run.output / f"rollouts/step_{step + 1:06d}.parquet").exists()
    assert status_in_mlflow(tmp_path) == "KILLED"


@pytest.mark.faults
def test_an_interrupt_of_a_sweep_ends_its_run_and_the_sweep(tmp_path):
    run = Run(tmp_path, "--multirun", "seed=0,1", f"output_dir={tmp_path}/out")
    run.wait_for_step(1, run.output)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 130, run.log.read_text()
    assert "run 2 of 2" not in run.log.read_text()
    assert checkpoint.complete(str(run.output))
    assert status_in_mlflow(tmp_path) == "KILLED"


@pytest.mark.faults
def test_a_second_signal_ends_it_at_once(tmp_path):
    run = Run(tmp_path, f"output_dir={tmp_path}/out", "algorithm.problems_per_step=64", "algorithm.group_size=8")
    run.wait_for_step(1, run.output)
    for _ in range(2):
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    assert run.end() == 143, run.log.read_text()
    assert status_in_mlflow(tmp_path) == "KILLED"
