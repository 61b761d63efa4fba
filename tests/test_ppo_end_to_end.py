"""PPO and EasyPPO as their user starts them: critic warm-up, then updates; killed and resumed; and what the report says of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import DEADLINE_S, ONE_ENGINE, SMALL, alone, killed_after, run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("joined")]

STEPS, WARMUP, CHECKPOINT, KILLED_AFTER = 6, 2, 3, 5
LOSSES = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/vf_explained_var")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ppo")


def settings(workspace: Path, algorithm: str) -> list[str]:
    return [
        f"algorithm={algorithm}",
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


def logged(output: Path) -> list[dict]:
    """What a run logged, in the order of the logging; a step that was done again is there twice."""
    lines = [json.loads(line) for line in (output / "mlflow.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "metrics" and "critic/vf_loss" in line["values"]]


@pytest.fixture(scope="module")
def easyppo(workspace) -> list[dict]:
    """EasyPPO, killed after a step that is in no checkpoint and gone on from the one before."""
    output, own = workspace / "easyppo", settings(workspace, "easyppo")
    last = output / "rollouts" / f"step_{KILLED_AFTER:06d}.parquet"
    killed_after(last, workspace / "log", "pipelines.train", *own, f"output_dir={output}")
    run("pipelines.train", *own, f"resume={output}")
    return logged(output)


@pytest.fixture(scope="module")
def ppo(workspace) -> list[dict]:
    """PPO, on a cluster that the command starts and ends."""
    run("pipelines.train", *settings(workspace, "ppo"), f"output_dir={workspace}/ppo", environment=alone())
    return logged(workspace / "ppo")


def test_the_critic_warms_up_and_then_both_learn(easyppo, ppo):
    for steps, minibatches in ((easyppo, 4), (ppo, 1)):
        for line in steps:
            values = line["values"]
            warming_up = line["step"] <= WARMUP
            assert ("critic/warmup" in values) == warming_up
            assert ("actor/pg_loss" in values) != warming_up
            assert values["critic/grad_norm"] > 0
            assert ("critic/noise_weight/mean" in values) == (minibatches == 4)
    assert [line["step"] for line in ppo] == list(range(1, STEPS + 1))


def test_a_resumed_run_has_the_same_next_losses(easyppo):
    """The steps after the checkpoint were done by the run that was killed and by the one that went on."""
    twice = [[line["values"] for line in easyppo if line["step"] == step] for step in range(CHECKPOINT + 1, KILLED_AFTER)]
    assert twice
    for before, after in twice:
        for name in LOSSES:
            assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-5), name


def test_the_checkpoint_has_the_critic_and_its_counts(easyppo, workspace):
    path = workspace / f"easyppo/checkpoints/step_{STEPS:06d}"
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["batches"], manifest["updates"], manifest["critic_updates"]) == (STEPS, STEPS - WARMUP, 4 * STEPS)
    assert (path / "critic/value_head.safetensors").is_file()


def test_the_critics_gradients_are_reported(easyppo, workspace):
    page = workspace / "gradients.html"
    checkpoints = f"checkpoints={workspace}/easyppo/checkpoints/step_{STEPS:06d}"
    report = subprocess.run(
        [
            sys.executable,
            "-m",
            "pipelines.report",
            "critic_gradients",
            checkpoints,
            f"out={page}",
            f"uri=sqlite:///{workspace}/mlflow.db",
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert report.returncode == 0, report.stderr
    assert "weighted slope" in report.stdout
    assert page.read_text().count("data:image/png;base64,") == 2
