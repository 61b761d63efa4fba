"""The coordinator without Ray: what it plans, what it takes in, and that a restored one goes on as if nothing had happened."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from algorithms.flops import DecodingCost
from algorithms.replay import Replay
from algorithms.types import Credit, Problem
from pipelines.rollout import schema
from pipelines.rollout.coordinator import Coordinator, CoordinatorConfig
from pipelines.rollout.stages import credit
from pipelines.store.tracker import TrackingConfig
from tests.conftest import configure, new_store

PROBLEMS = [Problem(f"p{i}", "chain_arithmetic", [1, 2, 3], "33") for i in range(10)]


def make(tmp_path, state=None, algorithm=None, problems=PROBLEMS, self_critic_prompt=None, context_limit=0, **fields):
    run = configure()
    tracking = TrackingConfig(new_store(tmp_path), str(tmp_path / "artifacts"), "test", None, 2, False)
    settings = CoordinatorConfig(
        seed=0,
        steps=10,
        logprob_diff_alarm=0.1,
        max_missing_reward=0.5,
        keep_steps=(),
        reward_range=(0.0, 1.0),
        evaluation=run.evaluation,
        eval_max_new_tokens=8,
        sampling=run.sampling,
        keep_rollouts=2,
        output_dir=str(tmp_path),
        replay_url=str(tmp_path / "replay"),
        replay_start_from=None,
        tokenizer_hash="t",
        self_critic_prompt=self_critic_prompt,
        context_limit=context_limit,
        tracking=tracking,
        params={"a": {"b": 1}},
        tags={"algorithm": "grpo"},
    )
    algorithm = algorithm or dataclasses.replace(run.algorithm, problems_per_step=4, group_size=2, minibatches=1, **fields)
    return Coordinator(settings, algorithm, problems, problems[:2], DecodingCost(10, 1), state)


def answer(table, rewards, algorithm=None, tokens=2):
    """The planned table with responses of some tokens and the given rewards per row, credited."""
    generated = {
        "response_ids": [[list(range(5, 5 + tokens))] * n for n in table["n"].to_pylist()],
        "response_text": [["x"] * n for n in table["n"].to_pylist()],
        "rollout_logprobs": [[[-0.1] * tokens] * n for n in table["n"].to_pylist()],
        "finish_reason": [["stop"] * n for n in table["n"].to_pylist()],
        "truncated": [[False] * n for n in table["n"].to_pylist()],
        "self_scored": [[False] * n for n in table["n"].to_pylist()],
        "endpoint_value": [[None] * n for n in table["n"].to_pylist()],
        "prefix_value": [None] * table.num_rows,
        "reference_left_out": [False] * table.num_rows,
    }
    table = schema.append(table, generated, "generate")
    status = ["ok" if r is not None else "error: gone" for r in rewards]
    judged = {
        "reward": [rewards[:n] for n in table["n"].to_pylist()],
        "acc": [rewards[:n] for n in table["n"].to_pylist()],
        "reward_status": [status[:n] for n in table["n"].to_pylist()],
    }
    table = schema.append(table, judged, "judge")
    return credit(table, algorithm or configure().algorithm)


def step(coordinator, k, rewards=(1.0, 0.0)):
    assert coordinator.plan(k, 0, k - 1) == 4
    table = coordinator.rows(0, 1)
    coordinator.ingest(answer(table, list(rewards)))
    coordinator.record_span("timing_s/gen", k, False, 1.0, 3.0)
    return table, coordinator.finish_step(k, {"timing_s/step": 2.0})


def test_each_problem_comes_once_per_epoch_in_shuffled_order(tmp_path):
    coordinator = make(tmp_path)
    drawn = [p.problem_id for _ in range(5) for p in coordinator.fresh_problems(4)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(p.problem_id for p in PROBLEMS)
    assert drawn[:10] != drawn[10:]


def test_blocks_share_the_planned_rows(tmp_path):
    coordinator = make(tmp_path)
    coordinator.plan(1, 0, 0)
    ids = [i for block in range(3) for i in coordinator.rows(block, 3)["row_id"].to_pylist()]
    assert sorted(ids) == coordinator.rows(0, 1)["row_id"].to_pylist()


def test_planning_a_round_twice_plans_it_once(tmp_path):
    coordinator = make(tmp_path)
    coordinator.plan(1, 0, 0)
    before = coordinator.rows(0, 1)
    assert coordinator.plan(1, 0, 0) == 4
    assert coordinator.rows(0, 1).equals(before)


def test_step_metrics_by_hand(tmp_path):
    _, metrics = step(make(tmp_path), 1)
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["response_length/mean"] == 2.0
    assert metrics["decode/flops"] == 8 * (10 * 1 + 1 * (1 * 3 + 1))  # eight responses, p = 3, one decoding forward each
    assert metrics["decode/tokens_total"] == 16
    assert metrics["timing_s/gen"] == 2.0
    assert metrics["perf/throughput"] == (8 * 3 + 16) / 2.0
    assert metrics["training/epoch"] == 0.4


def test_a_row_that_comes_twice_counts_once(tmp_path):
    coordinator = make(tmp_path)
    coordinator.plan(1, 0, 0)
    table = answer(coordinator.rows(0, 1), [1.0, 0.0])
    coordinator.ingest(table)
    coordinator.ingest(table)
    assert coordinator.finish_step(1, {})["training/groups"] == 4


def test_another_step_may_be_planned_before_this_one_is_finished(tmp_path):
    coordinator = make(tmp_path)
    coordinator.plan(1, 0, 0)
    coordinator.ingest(answer(coordinator.rows(0, 1), [1.0, 0.0]))
    coordinator.plan(2, 0, 1)
    assert coordinator.finish_step(1, {})["training/groups"] == 4


def test_dynamic_sampling_asks_again_for_flat_groups_and_is_bounded(tmp_path):
    algorithm = dataclasses.replace(configure("algorithm=dapo").algorithm, problems_per_step=4, group_size=2, minibatches=1)
    coordinator = make(tmp_path, algorithm=algorithm)
    assert coordinator.plan(1, 0, 0) == 4
    table = coordinator.rows(0, 1)
    coordinator.ingest(answer(table.slice(0, 1), [1.0, 0.0], algorithm))
    coordinator.ingest(answer(table.slice(1), [1.0, 1.0], algorithm))
    assert coordinator.plan(1, 1, 0) == 3
    again = coordinator.rows(0, 1)
    assert not set(again["row_id"].to_pylist()) & set(table["row_id"].to_pylist())
    coordinator.ingest(answer(again, [0.0, 0.0], algorithm))
    assert coordinator.plan(1, 2, 0) == 3
    coordinator.ingest(answer(coordinator.rows(0, 1), [0.0, 0.0], algorithm))
    assert coordinator.plan(1, 3, 0) == 0
    assert coordinator.finish_step(1, {})["training/filter_groups/dropped"] == 9


def test_missing_rewards_are_counted_and_stop_the_run_above_the_limit(tmp_path):
    coordinator = make(tmp_path)
    _, metrics = step(coordinator, 1, rewards=(None, 1.0))
    assert metrics["reward/missing_fraction"] == 0.5
    assert metrics["critic/score/mean"] == 1.0
    with pytest.raises(RuntimeError, match=r"step 2: 100% .* error: gone"):
        step(coordinator, 2, rewards=(None, None))


def test_a_restored_coordinator_draws_the_same_next_batches(tmp_path):
    first = make(tmp_path)
    step(first, 1)
    state = json.loads(json.dumps(first.state()))
    second = make(tmp_path, state)
    for k in (2, 3, 4):  # across the end of the epoch
        (mine, a), (other, b) = step(first, k), step(second, k)
        assert mine.equals(other)
        assert a["decode/flops_total"] == b["decode/flops_total"]
    assert second.progress()["mlflow_run_id"] == first.progress()["mlflow_run_id"]


def test_evaluation_metrics_and_their_place(tmp_path):
    coordinator = make(tmp_path)
    step(coordinator, 1)
    assert coordinator.plan_evaluation(1, 1) == 2
    table = coordinator.rows(0, 1)
    assert set(table["purpose"].to_pylist()) == {"eval"}
    coordinator.ingest(answer(table, [1.0, 0.0, 0.0, None]))
    for stage in ("timing_s/gen", "timing_s/reward"):
        coordinator.record_span(stage, 1, True, 0.0, 1.0)
    metrics = coordinator.finish_evaluation(1)
    assert metrics["val-core/chain_arithmetic/acc/mean@4"] == pytest.approx(1 / 3)
    assert metrics["val-core/chain_arithmetic/acc/best@2/mean"] == pytest.approx(1 - (2 / 3) ** 2, abs=0.05)
    assert metrics["val-aux/chain_arithmetic/missing"] == 2
    assert coordinator.state()["evaluations"] == {"1": pytest.approx(1 / 3)}


def test_the_newest_steps_stay_on_disk(tmp_path):
    coordinator = make(tmp_path)
    for k in range(1, 5):
        step(coordinator, k)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_000003.parquet", "step_000004.parquet"]


def test_steps_are_written_as_parquet(tmp_path):
    import pyarrow.parquet as pq

    step(make(tmp_path), 1)
    table = pq.read_table(tmp_path / "rollouts" / "step_000001.parquet")
    assert table.schema.equals(schema.credited(Credit))
    assert table.num_rows == 4
    assert np.asarray(table["step"]).tolist() == [1] * 4


REPLAY = Replay(capacity=6, refill_problems=3, cut_grid=4, max_cut_fraction=0.9)


def checkpointed(coordinator, tmp_path):
    """The coordinator's part of a checkpoint, written and read again; the files that it names are kept from then on."""
    saved = tmp_path / "checkpoints" / f"step_{coordinator.step:06d}"
    saved.mkdir(parents=True)
    (saved / "coordinator.json").write_text(json.dumps(coordinator.state()))
    (saved / "manifest.json").write_text("{}")
    return json.loads((saved / "coordinator.json").read_text())


def replayed_step(coordinator, k):
    """A step of Prefix GRPO: three refills and four groups of two."""
    assert coordinator.plan(k, 0, k - 1) == 7
    table = coordinator.rows(0, 1)
    coordinator.ingest(answer(table, [1.0, 0.0], tokens=20))
    return table, coordinator.finish_step(k, {})


def test_refills_enter_the_buffer_and_feed_the_next_plan(tmp_path):
    coordinator = make(tmp_path, replay=REPLAY)
    table, metrics = replayed_step(coordinator, 1)
    assert table["purpose"].to_pylist() == ["refill"] * 3 + ["train"] * 4
    assert table["n"].to_pylist() == [1] * 3 + [2] * 4
    assert not any(table["prefix_ids"].to_pylist())  # the buffer was empty: fresh problems stood in
    assert (metrics["replay/size"], metrics["training/groups"], metrics["refill/score/mean"]) == (3, 4, 1.0)
    assert metrics["decode/tokens"] == (3 + 8) * 20
    refilled = set(table["problem_id"].to_pylist()[:3])
    table, metrics = replayed_step(coordinator, 2)
    rows = [row for row in table.to_pylist() if row["purpose"] == "train"]
    assert {row["problem_id"] for row in rows} == refilled
    for row in rows:
        assert row["prefix_ids"] == list(range(5, 5 + len(row["prefix_ids"])))
        assert len(row["prefix_ids"]) in (0, 4, 8, 12, 16)
        assert row["max_new_tokens"] + len(row["prefix_ids"]) == coordinator._algorithm.max_new_tokens
    replayed_step(coordinator, 3)
    assert [t.step for t in coordinator.trajectories()] == [2, 2, 2, 3, 3, 3]


def test_refills_get_no_credit_and_stay_out_of_the_trainer(tmp_path):
    coordinator = make(tmp_path, replay=REPLAY)
    coordinator.plan(1, 0, 0)
    credited_rows = answer(coordinator.rows(0, 1), [1.0, 0.0]).to_pylist()
    assert [row["keep"] for row in credited_rows] == [False] * 3 + [True] * 4
    assert credited_rows[0]["actor_mask"] == [False]


@pytest.mark.parametrize("branch", [False, True])
def test_a_restored_coordinator_replays_the_same_prefixes(tmp_path, branch):
    """Whether its folder is the run's, or that of a branch, which takes the buffer over from where the other run has it."""
    first = make(tmp_path, replay=REPLAY)
    for k in (1, 2):
        replayed_step(first, k)
    state = checkpointed(first, tmp_path)
    if not branch:
        shutil.copytree(tmp_path, tmp_path / "second", ignore=shutil.ignore_patterns("second", "mlflow*"))
    second = make(tmp_path / "second", state, replay=REPLAY)
    for k in (3, 4, 5):
        mine, other = replayed_step(first, k)[0], replayed_step(second, k)[0]
        assert mine.equals(other)
        assert any(mine["prefix_ids"].to_pylist())


def test_a_buffer_file_cut_short_is_skipped_said_and_counted(tmp_path):
    first = make(tmp_path, replay=REPLAY)
    for k in (1, 2):
        replayed_step(first, k)
    broken = tmp_path / "replay" / first.state()["replay"]["files"][0]
    broken.write_bytes(broken.read_bytes()[:64])
    second = make(tmp_path, first.state(), replay=REPLAY)
    (warning,) = second.progress()["warnings"]
    assert broken.name in warning
    table, metrics = replayed_step(second, 3)
    assert metrics["replay/skipped_files"] == 1
    assert metrics["replay/size"] == 6  # three of step 2, three of step 3
    assert any(table["prefix_ids"].to_pylist())


def test_a_trainer_that_starts_again_takes_the_coordinator_back_with_it(tmp_path):
    coordinator = make(tmp_path, replay=REPLAY)
    replayed_step(coordinator, 1)
    checkpointed(coordinator, tmp_path)
    saved = tmp_path / "checkpoints" / "step_000001"
    coordinator.rewind(None)  # as at the start of every run
    coordinator.rewind(str(saved))
    table, _ = replayed_step(coordinator, 2)
    late = answer(table, [1.0, 0.0])  # from the ranks that died: their step is over
    coordinator.ingest(late)
    replayed_step(coordinator, 3)
    coordinator.rewind(str(saved))
    again, metrics = replayed_step(coordinator, 2)
    assert again.equals(table)
    assert metrics["training/restarts"] == 2
    names = {path.name for path in (tmp_path / "replay").glob("*.parquet")}
    assert set(coordinator.state()["replay"]["files"]) <= names  # nothing that is needed was deleted


def test_an_error_that_starting_again_would_not_mend_is_kept(tmp_path):
    coordinator = make(tmp_path)
    assert coordinator.fatal_error() is None
    coordinator.fail("first", "line 1")
    coordinator.fail("second", "line 2")
    assert coordinator.fatal_error() == f"first\n(traceback in {tmp_path}/failure.txt)"
    assert (tmp_path / "failure.txt").read_text() == "line 1"
