"""What goes wrong in a stage reaches the user in its own words, through Ray Data and Ray Train."""

import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from algorithms.grpo import GRPO
from algorithms.types import Problem, PromptRow
from pipelines.engines.config import Sampling
from pipelines.rollout.dataset import rollout_dataset
from pipelines.rollout.plan import plan_table
from pipelines.trainer.failures import root_cause, trace_of
from tests.commands import DEADLINE_S, ONE_ENGINE, SMALL, alone, command
from tests.conftest import configure

pytestmark = pytest.mark.engine


class Engines:
    """Answers with tokens that the self-critic scores, or breaks."""

    def __init__(self, broken=False, judged=False):
        self.broken, self.judged = broken, judged

    def generate(self, rows, sampling, critic):
        if self.broken:
            raise KeyError("no such engine")
        fields = {"response_ids": [5, 6], "response_text": "ab", "rollout_logprobs": [-0.1, -0.2], "finish_reason": "stop"}
        fields |= {"truncated": False, "self_scored": not self.judged, "endpoint_value": 0.5}
        return [
            {n: [v] * row["n"] for n, v in fields.items()} | {"prefix_value": None, "reference_left_out": False} for row in rows
        ]


class Coordinator:
    """Plans two rows, and takes them, or breaks."""

    def __init__(self, broken=False, truth='"33"'):
        self.broken, self.truth = broken, truth

    def ask(self, method, *arguments, timeout_s=0.0):
        if method == "rows":
            problem = Problem("p", "chain_arithmetic", [1, 2], self.truth)
            return plan_table([PromptRow(problem, 2, 10)] * 2, 1, 0, 0, 0)
        if self.broken:
            raise KeyError("no such step")
        return None

    def tell(self, *_):
        pass


class BrokenCredit(GRPO):
    """Credits nobody."""

    def credit(self, group):
        raise ZeroDivisionError("division by zero")


def broken_algorithm():
    own = configure("algorithm=grpo").algorithm
    return BrokenCredit(**{field.name: getattr(own, field.name) for field in dataclasses.fields(own)})


STAGES = {
    "generate": (Engines(broken=True), Coordinator(), None, "stage generate: KeyError: 'no such engine'"),
    "judge": (Engines(judged=True), Coordinator(truth="no JSON"), None, "stage judge: Expecting value: line 1 column 1 (char 0)"),
    "credit": (Engines(), Coordinator(), broken_algorithm, "stage credit: ZeroDivisionError: division by zero"),
    "deliver": (Engines(), Coordinator(broken=True), None, "stage deliver: KeyError: 'no such step'"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_in_a_stage_keeps_its_words_and_its_place(ray_cluster, stage):
    engines, coordinator, algorithm, words = STAGES[stage]
    config = configure("algorithm=grpo")
    chosen = algorithm() if algorithm is not None else config.algorithm
    dataset = rollout_dataset(coordinator, engines, config.judge, chosen, {"train": Sampling(1.0)}, blocks=1)
    with pytest.raises(Exception) as raised:  # noqa: PT011 (Ray's own types)
        list(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
    assert root_cause(raised.value) == words
    assert 'File "' in trace_of(raised.value)
    assert "UDF failed" not in root_cause(raised.value)


def test_without_a_fault_the_stages_pass_rows(ray_cluster):
    config = configure("algorithm=grpo")
    dataset = rollout_dataset(Coordinator(), Engines(), config.judge, config.algorithm, {"train": Sampling(1.0)}, blocks=1)
    table = pa.concat_tables(list(dataset.iter_batches(batch_size=None, batch_format="pyarrow")))
    assert table.num_rows == 2
    assert np.isnan(np.array(table["reward"].to_pylist(), dtype=float)).all()


class BrokenPlan(GRPO):
    """Plans nothing."""

    def plan(self, state):
        raise KeyError("no such field")


def test_an_error_of_the_coordinator_ends_the_run_in_its_own_words(tmp_path):
    arguments = [*SMALL, ONE_ENGINE, f"algorithm.implementation={__name__}.BrokenPlan", f"output_dir={tmp_path}/out"]
    arguments += ["steps=1", "evaluation.every=0", "cluster.learner.max_restarts=0", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    whole = command("pipelines.train", *arguments)
    done = subprocess.run(whole, capture_output=True, text=True, timeout=DEADLINE_S, env=alone())
    assert done.returncode == 1
    file = tmp_path / "out/failure.txt"
    assert "error: KeyError: 'no such field'" in done.stderr
    assert f"(traceback in {file})" in done.stderr
    assert Path(__file__).name in file.read_text()
