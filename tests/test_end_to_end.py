"""The whole loop as its user starts it: every part real, killed and resumed, evaluated and opened by others."""

import json
from pathlib import Path

import mlflow
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines import replay, train
from pipelines.command.entry import command
from pipelines.config.compose import compose, resolved
from pipelines.report.__main__ import main as report
from tests.commands import ONE_ENGINE, SMALL, alone, killed_after, run
from tests.conftest import TINY
from tests.metrics import logged, unlisted

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("joined")]

SMOLLM2 = Path("models/smollm2-135m")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


STEPS, KILLED_AFTER = 10, 7


@pytest.fixture(scope="module")
def settings(workspace) -> list[str]:
    """AC2 with readiness so early that judged groups, chunks and audits all occur; it replays, as Prefix GRPO does."""
    return [
        "algorithm=ac2",
        "task=number_walk",
        "algorithm.replay.refill_problems=8",
        "algorithm.replay.capacity=12",
        "algorithm.readiness.global_threshold=1.1",
        "algorithm.readiness.local_threshold=1.1",
        "algorithm.reference_reward=0",
        "algorithm.min_valid=2",
        *SMALL,
        f"steps={STEPS}",
        "checkpoint.keep_steps=[2]",
        f"tracking.uri=sqlite:///{workspace}/mlflow.db",
        f"tracking.artifacts={workspace}/artifacts",
    ]


@pytest.fixture(scope="module")
def killed(workspace, settings) -> dict:
    """A run whose driver is killed after a step that is in no checkpoint; what that step's batch was."""
    output = workspace / "out"
    last = output / "rollouts" / f"step_{KILLED_AFTER:06d}.parquet"
    killed_after(last, workspace / "log", "pipelines.train", *settings, f"output_dir={output}")
    return {"output": output, "batch": pq.read_table(last).to_pylist()}


@pytest.fixture(scope="module")
def resumed(killed, settings) -> dict:
    """The same run, gone on from its newest checkpoint to the end."""
    assert [path.name for path in sorted((killed["output"] / "checkpoints").glob("*/manifest.json"))]
    stdout = run("pipelines.train", *settings, f"resume={killed['output']}", ONE_ENGINE)
    return killed | {"stdout": stdout}


def batch_of(output: Path, step: int) -> list[dict]:
    return pq.read_table(output / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def test_a_resumed_run_draws_the_same_next_batch(resumed):
    again = batch_of(resumed["output"], KILLED_AFTER)
    assert any(row["prefix_ids"] for row in again)
    assert any(row["reference_ids"] for row in again)
    planned = (
        "row_id",
        "problem_id",
        "prompt_ids",
        "prefix_ids",
        "purpose",
        "seed",
        "policy_version",
        "n",
        "max_new_tokens",
        "chunk",
    )
    for column in (*planned, "reference_ids"):
        assert [row[column] for row in again] == [row[column] for row in resumed["batch"]], column
    same = sum(a["response_ids"] == b["response_ids"] for a, b in zip(again, resumed["batch"], strict=True))
    assert same >= len(again) - 1  # the same weights and seeds; a tie in float32 may fall differently


def test_chunks_audits_and_judged_groups_all_occur(resumed):
    rows = [row for step in range(1, STEPS + 1) for row in batch_of(resumed["output"], step) if row["purpose"] != "refill"]
    assert {row["purpose"] for row in rows} == {"train", "audit"}
    assert {row["chunk"] for row in rows} == {True, False}
    statuses = {status for row in rows for status in row["reward_status"]}
    assert statuses == {"ok", "self_critic"}
    for row in rows:
        for owned, reward, status, value in zip(
            row["self_scored"], row["reward"], row["reward_status"], row["endpoint_value"], strict=True
        ):
            assert owned == (status == "self_critic") == (reward is None)
            assert value is None or owned
        if row["purpose"] == "audit" or not row["chunk"]:
            assert not any(row["self_scored"])
    assert any(row["prefix_value"] is not None for row in rows)
    assert {round(10 * row["self_critic_target"], 4) for row in rows if row["self_critic_target"] is not None} <= set(range(11))


def the_run(workspace):
    client = mlflow.MlflowClient(f"sqlite:///{workspace}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("number_walk").experiment_id])
    return client, found


def test_it_goes_on_in_the_same_mlflow_run(resumed, workspace):
    client, run = the_run(workspace)
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm.group_size"] == "4"
    assert {"git_sha", "config_digest", "algorithm", "task", "checkpoint"} <= set(run.data.tags)
    for metric in ("actor/pg_loss", "ac2/self_critic_loss", "ac2/critic_mae", "timing_s/self_critic"):
        assert {m.step for m in client.get_metric_history(run.info.run_id, metric)} == set(range(1, STEPS + 1))
    assert {m.step for m in client.get_metric_history(run.info.run_id, "val-core/number_walk/acc/mean_at_2")} == {0, 4, 8, STEPS}
    assert any(artifact.path == "sample_rollouts.json" for artifact in client.list_artifacts(run.info.run_id))


def test_all_that_is_logged_is_documented(resumed):
    names = logged(resumed["output"])
    assert {"replay/size", "ac2/endpoint_value/mean", "refill/score/mean"} <= names
    assert not unlisted(names)


def test_trainer_and_engine_agree_from_the_first_step(resumed, workspace):
    client, run = the_run(workspace)
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "rollout_corr/rollout_is_max")}
    assert all(abs(value - 1) < 1e-4 for value in history.values()), history


def test_the_last_checkpoint_is_whole_and_opens_as_an_ordinary_model(resumed):
    path = resumed["output"] / "checkpoints" / f"step_{STEPS:06d}"
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["updates"]) == (STEPS, {"actor": 2 * STEPS, "self_critic": STEPS})
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    tokenizer = AutoTokenizer.from_pretrained(path / "model")
    assert tokenizer.chat_template
    shipped = AutoModelForCausalLM.from_pretrained(TINY)
    for (name, new), old in zip(model.named_parameters(), shipped.parameters(), strict=True):
        assert not torch.equal(new, old), f"{name} did not change"


def test_the_end_says_where_everything_is(resumed):
    for text in ("validation mean@2", "decoding", "wall time", f"step_{STEPS:06d}", "mlflow ui --backend-store-uri"):
        assert text in resumed["stdout"]


def test_evaluate_writes_a_row_per_problem(resumed, workspace):
    table = workspace / "evaluation.parquet"
    stdout = run(
        "pipelines.evaluate",
        f"checkpoint={resumed['output']}",
        f"output={table}",
        "task=number_walk",
        "task.validation.count=8",
        "evaluation.n=4",
        ONE_ENGINE,
    )
    assert "val-core/number_walk/acc/mean@4" in stdout
    assert "val-core/number_walk/acc/best@4/mean" in stdout
    rows = pq.read_table(table).to_pylist()
    assert len(rows) == 8
    assert all(len(row["rewards"]) == 4 for row in rows)


def test_prefixes_are_replayed_offline_and_the_critic_is_diagnosed(resumed, workspace, capsys):
    groups, page = workspace / "groups", workspace / "diagnostics.html"
    arguments = [
        f"checkpoint={resumed['output']}",
        "problems=all",
        f"output={groups}",
        "task=number_walk",
        "prefixes=6",
        "rows_per_file=2",
        "group_size=3",
        "chunk_tokens=16",
        ONE_ENGINE,
    ]
    replay.run(resolved(compose(arguments, "replay")))
    files = sorted(groups.glob("*.parquet"))
    assert [pq.read_table(file).num_rows for file in files] == [2, 2, 2]
    replay.run(resolved(compose(arguments, "replay")))
    assert "3, 0 to make" in capsys.readouterr().out  # the second time starts no engine
    assert any(row["reference_ids"] is not None for file in files for row in pq.read_table(file).to_pylist())
    assert report(["diagnostics", f"groups={groups}", f"out={page}", f"uri=sqlite:///{workspace}/mlflow.db"]) == 0
    assert "signed bias" in capsys.readouterr().out
    assert "data:image/png;base64," in page.read_text()


def test_a_checkpoint_is_probed_with_what_its_run_sampled_next(resumed, workspace, capsys):
    groups = workspace / "probes"
    source = resumed["output"] / "checkpoints/step_000002"
    replay.run(
        resolved(compose([f"checkpoint={source}", f"output={groups}", "mode=probe", "task=number_walk", ONE_ENGINE], "replay"))
    )
    assert f"of steps 3 to {STEPS}" in capsys.readouterr().out
    rows = [row for file in sorted(groups.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert rows
    assert all(None not in row["reward"] and not any(row["probed"]) for row in rows)
    assert any(row["value_with_reference"] is not None for row in rows)
    assert report(["diagnostics", f"groups={groups}", f"out={workspace}/probes.html", f"uri=sqlite:///{workspace}/mlflow.db"]) == 0
    assert "with reference" in capsys.readouterr().out


def test_a_cluster_too_small_fails_with_a_table(workspace, capsys):
    arguments = [
        *SMALL,
        "cluster.engines.count=20",
        f"output_dir={workspace}/none",
        f"tracking.uri=sqlite:///{workspace}/mlflow.db",
    ]
    assert command("pipelines.train", arguments, "", "config", train.run) == 2
    said = capsys.readouterr().err
    assert "too small" in said
    assert "20 engines" in said


def test_fine_tuning_lowers_the_loss_and_writes_a_model(workspace):
    from pipelines.data import demonstrations
    from tests.pipelines.data.test_problems import jsonl

    rows = demonstrations.stage_rows("noise", seed=1, limit=640)
    file = jsonl(workspace / "demonstrations.jsonl", rows)
    output = workspace / "sft"
    run(
        "pipelines.sft",
        f"data.files=[{file}]",
        f"output_dir={output}",
        "batch_size=32",
        "optimizer.lr=1e-3",
        "tracking.system_metrics=false",
        f"tracking.uri=sqlite:///{workspace}/mlflow.db",
        f"tracking.artifacts={workspace}/artifacts",
        environment=alone(),
    )
    assert AutoModelForCausalLM.from_pretrained(output).config.model_type == "qwen3"
    assert [json.loads(line)["step"] for line in (output / "progress.jsonl").read_text().splitlines()] == [20]


@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is not there: python -m pipelines.fetch_model smollm2-135m")
def test_a_real_pretrained_model_is_trained(workspace):
    output = workspace / "smollm2"
    run(
        "pipelines.train",
        "experiment=smollm2_chain_sum",
        "steps=2",
        "algorithm.problems_per_step=4",
        "algorithm.group_size=4",
        "evaluation.every=0",
        "tracking.system_metrics=false",
        f"output_dir={output}",
        f"tracking.uri=sqlite:///{workspace}/smollm2.db",
        f"tracking.artifacts={workspace}/artifacts",
    )
    trained = AutoModelForCausalLM.from_pretrained(output / "checkpoints/step_000002/model", dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    changed = [not torch.equal(a, b) for a, b in zip(trained.parameters(), original.parameters(), strict=True)]
    assert all(changed)
    client = mlflow.MlflowClient(f"sqlite:///{workspace}/smollm2.db")
    (found,) = client.search_runs([client.get_experiment_by_name("reasoning_gym_chain_sum").experiment_id])
    assert found.data.metrics["training/rollout_logprob_diff_mean"] < 0.1  # bfloat16 in two implementations
