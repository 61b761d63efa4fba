"""Offline prefix replay without engines: what is cut, what is asked of the critic, and how a job goes on."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.replay import Replay
from algorithms.self_critic import SelfCriticPrompt
from pipelines import replay
from pipelines.config.compose import compose, resolved
from pipelines.config.make import ConfigError
from pipelines.data.prompts import load_tokenizer
from pipelines.engines.self_critic import SelfCritic
from pipelines.report.probes import GroupFolder, probes
from pipelines.rollout import offline, schema
from pipelines.store import checkpoint
from pipelines.store.replay_buffer import ReplayBuffer
from tests.conftest import TINY
from tests.pipelines.store.test_replay_buffer import row, table

REPLAY = Replay(capacity=1, refill_problems=1, cut_grid=4, max_cut_fraction=0.9)
JOB = offline.ReplayJob(
    prefixes=3,
    group_size=2,
    cut="grid",
    chunk_tokens=3,
    rows_per_file=2,
    seed=0,
    budget=40,
    replay=REPLAY,
    reference_reward=0.857,
)
PROMPT = SelfCriticPrompt((), (2,), (3,), (4, 2), tuple((10 + i, 1) for i in range(11)))


def stored(problems, rewards):
    """Trajectories of these problems with these rewards, as the buffer takes them."""
    pairs = enumerate(zip(problems, rewards, strict=True))
    return table(*(row(i) | {"problem_id": problem, "reward": reward} for i, (problem, reward) in pairs))


@given(st.integers(1, 200), st.sampled_from(["fraction", "grid"]), st.integers(0, 50))
def test_cuts_lie_where_the_paper_has_them(length, cut, seed):
    job = dataclasses.replace(JOB, cut=cut, replay=dataclasses.replace(REPLAY, cut_grid=7))
    at = job.cut_of(length, np.random.default_rng(seed))
    if cut == "grid":
        assert at % 7 == 0
        assert at <= 0.9 * length
    else:
        assert int(0.05 * length) <= at <= 0.95 * length


def test_the_latest_trajectory_of_each_problem_is_cut_and_never_its_own_reference(tmp_path):
    buffer = ReplayBuffer(str(tmp_path), 100, "t")
    buffer.append(stored("abca", [1.0, 1.0, 0.0, 1.0]))
    planned = offline.plan(JOB, buffer, bank={"c": [7, 7]}, prompt=PROMPT)
    found = {one["problem_id"]: one for one in planned.to_pylist()}
    assert set(found) == {"a", "b", "c"}
    held = buffer.trajectories()
    assert found["a"]["prefix_ids"] == buffer.prefix(held[3], len(found["a"]["prefix_ids"]))
    assert found["a"]["reference_ids"] == buffer.response(held[0].sequence)  # the other solution
    thinking = dataclasses.replace(PROMPT, close_thinking=tuple(buffer.response(held[0].sequence)[:2]))
    shown = {one["problem_id"]: one["reference_ids"] for one in offline.plan(JOB, buffer, {}, thinking).to_pylist()}
    assert shown["a"] == buffer.response(held[0].sequence)[2:]  # without its thinking, as in the bank
    assert found["b"]["reference_ids"] is None  # its only solution is the one that is cut
    assert found["c"]["reference_ids"] == [7, 7]  # from a checkpoint's bank
    assert all(one["max_new_tokens"] == 40 - len(one["prefix_ids"]) for one in found.values())
    assert planned.equals(offline.plan(JOB, buffer, bank={"c": [7, 7]}, prompt=PROMPT))


class Critic:
    """Answers with the state's length in tenths, less a tenth for a reference; None at length 9."""

    def values(self, states, critic):
        lengths = [(len(state["prefix_ids"]), state["reference_ids"] is not None) for state in states]
        return [None if length == 9 else length / 10 - 0.1 * informed for length, informed in lengths]


def judged(reference):
    group = {
        "prompt_ids": [5],
        "prefix_ids": [6] * 4,
        "reference_ids": reference,
        "response_ids": [[8] * 2, [8] * 5, [8] * 30],
        "reward": [1.0, 0.0, None],
    }
    return pa.Table.from_pylist([group])


def test_the_critic_is_asked_at_the_prefix_and_after_a_chunk_with_the_reference_and_without():
    queries = SelfCritic(PROMPT, context_limit=100, complete_answer=None)
    (asked,) = replay.ask(judged([9, 9]), Critic(), queries, JOB, TINY).to_pylist()
    assert asked["probed"] == [False, True, True]  # the first ended within its chunk
    assert (asked["value"], asked["value_with_reference"]) == (pytest.approx(0.4), pytest.approx(0.3))
    assert asked["probe_value"] == [None, pytest.approx(0.7), pytest.approx(0.7)]
    assert asked["probe_value_with_reference"] == [None, pytest.approx(0.6), pytest.approx(0.6)]
    (asked,) = replay.ask(judged(None), Critic(), queries, dataclasses.replace(JOB, chunk_tokens=5), TINY).to_pylist()
    assert asked["probed"] == [False, False, True]
    assert asked["probe_value"] == [None, None, None]  # an answer that was no value
    assert asked["value_with_reference"] is None


def test_a_job_goes_on_with_what_is_missing_and_refuses_another_jobs_folder(tmp_path):
    about = {"mode": "continue", "checkpoint": "m", "step": 7, "fingerprint": "job"}
    assert replay._missing(tmp_path, about, 3) == [0, 1, 2]
    replay._write(pa.table({"row_id": [5, 4]}), {4: str(replay.file_of(tmp_path, 1))})
    assert replay._missing(tmp_path, about, 3) == [0, 2]
    folder = GroupFolder.read(str(tmp_path))
    assert (folder.name, folder.mode, folder.step) == (tmp_path.name, "continue", 7)
    assert [one["row_id"] for one in folder.rows] == [4, 5]
    with pytest.raises(ConfigError, match="groups of another job"):
        replay._missing(tmp_path, about | {"fingerprint": "other"}, 3)


def test_a_plan_is_rows_of_the_schema(tmp_path):
    buffer = ReplayBuffer(str(tmp_path), 100, "t")
    with pytest.raises(ValueError, match="the buffer is empty"):
        offline.plan(JOB, buffer, {}, PROMPT)
    buffer.append(stored("a", [1.0]))
    assert offline.plan(JOB, buffer, {}, PROMPT).schema.equals(schema.STAGES["plan"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [("cut=middle", "use fraction or grid"), ("mode=both", "use continue or probe"), ("problems=some", "use null or ready or all")],
)
def test_settings_that_cannot_work_are_refused(tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        replay.run(resolved(compose([f"checkpoint={TINY}", f"output={tmp_path}", setting], "replay")))


def test_only_ready_problems_are_cut_also_those_whose_trajectory_has_left_the_buffer(tmp_path):
    buffer = ReplayBuffer(str(tmp_path), 2, "t")
    buffer.append(stored("abcd", [1.0] * 4))
    rows = offline.plan(JOB, buffer, {}, PROMPT, {"a", "d"})
    assert sorted(rows["problem_id"].to_pylist()) == ["a", "d"]
    with pytest.raises(ValueError, match="no trajectory of a ready problem"):
        offline.plan(JOB, buffer, {}, PROMPT, set())


def test_a_chunk_with_a_complete_answer_is_not_the_critics():
    """AC2 Appendix A.4: v_i is the reward where the chunk completes the trajectory, and a complete answer does."""
    tokenizer = load_tokenizer(TINY)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    group = {"prompt_ids": [5], "prefix_ids": ids("1+2"), "reference_ids": None, "reward": [1.0] * 3}
    group["response_ids"] = [ids("=3#03;4"), ids("=3;4+5;6"), ids("=3#0")]
    queries = SelfCritic(PROMPT, context_limit=100, complete_answer=r"#\d\d")
    job = dataclasses.replace(JOB, chunk_tokens=5)
    (asked,) = replay.ask(pa.Table.from_pylist([group]), Critic(), queries, job, TINY).to_pylist()
    assert asked["probed"] == [False, True, False]  # it holds #03; it goes on; it ended


def saved_run(folder, ready=("a",)):
    """A checkpoint of step 1 of a run with a buffer of two problems, which has gone on since."""
    buffer = ReplayBuffer(str(folder / "replay"), 2, "t")
    buffer.append(stored("ab", [1.0, 0.0]))
    path = folder / "checkpoints/step_000001"
    path.mkdir(parents=True)
    memory = {"readiness": {"ready": list(ready)}, "bank": ["a"]}
    arrays = {"bank": np.array([7, 8], np.int32), "bank_lengths": np.array([2])}
    state = {name: None for name in checkpoint.STATE_KEYS} | {"step": 1, "replay": buffer.state(), "replay_url": "/moved"}
    checkpoint.write_coordinator(path, state | {"memory": {"values": memory, "arrays": arrays}})
    (path / checkpoint.MANIFEST).write_text("{}")
    buffer.append(stored("ca", [1.0, 0.0]))
    return path


def test_the_buffer_is_the_one_that_the_checkpoint_saw(tmp_path):
    path = saved_run(tmp_path)
    for source in (str(path), str(tmp_path)):
        saved = offline.Saved.read(source)
        assert (saved.step, saved.ready, saved.bank) == (1, {"a"}, {"a": [7, 8]})
        for url in (None, f"{tmp_path}/replay/"):
            assert [one.problem_id for one in offline.open_buffer(url, saved, "t").trajectories()] == ["a", "b"]
    other = ReplayBuffer(str(tmp_path / "other"), 9, "t")
    other.append(stored("xyz", [1.0] * 3))
    assert set(offline.open_buffer(other.url, saved, "t").latest()) == {"x", "y", "z"}
    assert offline.Saved.read(TINY) is None
    with pytest.raises(ValueError, match="buffer=null: the checkpoint has no replay buffer"):
        offline.open_buffer(None, None, "t")


def test_a_probe_takes_judged_groups_with_a_reference_of_the_next_twenty_steps(tmp_path):
    path = saved_run(tmp_path)
    group = {"purpose": "train", "reference_ids": [9], "self_scored": [False] * 2, "reward": [1.0, 0.0], "prefix_ids": [6] * 4}
    group |= {"prompt_ids": [5], "response_ids": [[8], [8]], "problem_id": "a"}
    unfit = [{"purpose": "refill"}, {"reference_ids": None}, {"self_scored": [True, False]}, {"reward": [1.0, None]}]
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 21, 22):
        rows = [group | {"row_id": i} | change for i, change in enumerate([{}, *unfit])]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"rollouts/step_{step:06d}.parquet")
    rows, steps = offline.sampled_after(offline.Saved.read(str(path)))
    assert (rows["row_id"].to_pylist(), steps) == ([0, 1], [2, 21])
    queries = SelfCritic(PROMPT, context_limit=100, complete_answer=None)
    asked = replay.ask(rows, Critic(), queries, None, TINY).to_pylist()
    assert [(one["value"], one["value_with_reference"]) for one in asked] == [(pytest.approx(0.4), pytest.approx(0.3))] * 2
    (first, _), left_out = probes(asked)
    assert (first.f, first.r.mean(), sum(left_out.values())) == (0, 0.5, 0)
    (tmp_path / "rollouts/step_000002.parquet").unlink()
    (tmp_path / "rollouts/step_000021.parquet").unlink()
    with pytest.raises(ValueError, match=r"keep_steps=\[1\]"):
        offline.sampled_after(offline.Saved.read(str(path)))
