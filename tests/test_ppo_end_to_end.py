"""EasyPPO as its user starts it: critic warm-up, then updates; a branch that does the same; and what the report says of it."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.report.__main__ import main as report
from tests.commands import ONE_ENGINE, SMALL, run
from tests.metrics import logged as logged_names
from tests.metrics import unlisted

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("joined")]

STEPS, WARMUP, CHECKPOINT = 5, 2, 3
LOSSES = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/vf_explained_var")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ppo")


@pytest.fixture(scope="module")
def settings(workspace: Path) -> list[str]:
    return [
        "algorithm=easyppo",
        f"algorithm.critic.warmup_steps={WARMUP}",
        "task=chain_arithmetic",
        *[one for one in SMALL if not one.startswith(("evaluation.every", "checkpoint"))],
        f"checkpoint.every={CHECKPOINT}",
        "evaluation.every=0",
        ONE_ENGINE,
        f"steps={STEPS}",
        f"tracking.uri=sqlite:///{workspace}/mlflow.db",
        f"tracking.artifacts={workspace}/artifacts",
    ]


def logged(output: Path) -> dict[int, dict[str, float]]:
    """The metrics of a run by step."""
    lines = [json.loads(line) for line in (output / "mlflow.jsonl").read_text().splitlines()]
    return {line["step"]: line["values"] for line in lines if line["kind"] == "metrics" and "critic/vf_loss" in line["values"]}


@pytest.fixture(scope="module")
def whole(settings, workspace) -> Path:
    """A run from beginning to end; its folder."""
    run("pipelines.train", *settings, f"output_dir={workspace}/whole")
    return workspace / "whole"


@pytest.fixture(scope="module")
def branch(settings, whole, workspace) -> Path:
    """A run that begins where the other stood in its middle, with nothing changed but the number of ranks; its folder."""
    begin = f"branch_from={whole}/checkpoints/step_{CHECKPOINT:06d}"
    run("pipelines.train", *settings, begin, f"output_dir={workspace}/branch", "cluster.learner.ranks=1")
    return workspace / "branch"


def test_the_critic_warms_up_and_then_both_learn(whole):
    steps = logged(whole)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, values in steps.items():
        assert ("critic/warmup" in values) == (step <= WARMUP)
        assert ("actor/pg_loss" in values) == (step > WARMUP)
        assert values["critic/grad_norm"] > 0
        assert "critic/noise_weight/mean" in values


def test_all_that_is_logged_is_documented(whole):
    assert not unlisted(logged_names(whole))


def test_a_branch_does_what_the_run_did_from_there(whole, branch):
    """Weights, both optimizers and the prompt cursor came along: the same batches, and losses, as the run's own next steps."""
    before, after = logged(whole), logged(branch)
    assert sorted(after) == list(range(CHECKPOINT + 1, STEPS + 1))
    for step, values in after.items():
        theirs, own = (pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist() for run in (whole, branch))
        assert [row["prompt_ids"] for row in own] == [row["prompt_ids"] for row in theirs]
        for name in LOSSES:
            assert values[name] == pytest.approx(before[step][name], rel=1e-3, abs=1e-5), name


def test_the_checkpoint_has_the_critic_and_its_counts(whole):
    path = whole / f"checkpoints/step_{STEPS:06d}"
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["batches"], manifest["updates"]) == (STEPS, {"actor": STEPS - WARMUP, "value": 4 * STEPS})
    assert (path / "critic/value_head.safetensors").is_file()


def test_the_critics_gradients_are_reported(whole, workspace, capsys):
    page, checkpoints = workspace / "gradients.html", f"checkpoints={whole}/checkpoints/step_{STEPS:06d}"
    assert report(["critic_gradients", checkpoints, f"out={page}", f"uri=sqlite:///{workspace}/mlflow.db"]) == 0
    assert "weighted slope" in capsys.readouterr().out
    assert page.read_text().count("data:image/png;base64,") == 2
