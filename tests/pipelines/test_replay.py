"""Offline prefix replay without engines: what is cut, what is asked of the critic, and how a job goes on."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.replay import Replay
from algorithms.self_critic import SelfCriticPrompt
from pipelines import replay
from pipelines.config.make import ConfigError
from pipelines.engines.self_critic import SelfCritic
from pipelines.report.diagnostics import read_groups
from pipelines.rollout import schema
from pipelines.store.replay_buffer import ReplayBuffer
from tests.pipelines.store.test_replay_buffer import row, table

REPLAY = Replay(capacity=1, refill_problems=1, cut_grid=4, max_cut_fraction=0.9)
JOB = replay.ReplayJob(
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
    planned = replay.plan(JOB, buffer, bank={"c": [7, 7]}, prompt=PROMPT)
    found = {one["problem_id"]: one for one in planned.to_pylist()}
    assert set(found) == {"a", "b", "c"}
    held = buffer.trajectories()
    assert found["a"]["prefix_ids"] == buffer.prefix(held[3], len(found["a"]["prefix_ids"]))
    assert found["a"]["reference_ids"] == buffer.response(held[0].sequence)  # the other solution
    thinking = dataclasses.replace(PROMPT, close_thinking=tuple(buffer.response(held[0].sequence)[:2]))
    shown = {one["problem_id"]: one["reference_ids"] for one in replay.plan(JOB, buffer, {}, thinking).to_pylist()}
    assert shown["a"] == buffer.response(held[0].sequence)[2:]  # without its thinking, as in the bank
    assert found["b"]["reference_ids"] is None  # its only solution is the one that is cut
    assert found["c"]["reference_ids"] == [7, 7]  # from a checkpoint's bank
    assert all(one["max_new_tokens"] == 40 - len(one["prefix_ids"]) for one in found.values())
    assert planned.equals(replay.plan(JOB, buffer, bank={"c": [7, 7]}, prompt=PROMPT))


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
    (asked,) = replay.ask(judged([9, 9]), Critic(), queries, JOB).to_pylist()
    assert asked["probed"] == [False, True, True]  # the first ended within its chunk
    assert (asked["value"], asked["value_with_reference"]) == (pytest.approx(0.4), pytest.approx(0.3))
    assert asked["probe_value"] == [None, pytest.approx(0.7), pytest.approx(0.7)]
    assert asked["probe_value_with_reference"] == [None, pytest.approx(0.6), pytest.approx(0.6)]
    (asked,) = replay.ask(judged(None), Critic(), queries, dataclasses.replace(JOB, chunk_tokens=5)).to_pylist()
    assert asked["probed"] == [False, False, True]
    assert asked["probe_value"] == [None, None, None]  # an answer that was no value
    assert asked["value_with_reference"] is None


def test_a_job_goes_on_with_what_is_missing_and_refuses_another_jobs_folder(tmp_path):
    assert replay._missing(tmp_path, "job", 3) == [0, 1, 2]
    replay._write(pa.table({"row_id": [5, 4]}), {4: str(replay.file_of(tmp_path, 1))})
    assert replay._missing(tmp_path, "job", 3) == [0, 2]
    assert [one["row_id"] for one in read_groups([str(tmp_path)])] == [4, 5]
    with pytest.raises(ConfigError, match="groups of another job"):
        replay._missing(tmp_path, "other", 3)


def test_a_plan_is_rows_of_the_schema(tmp_path):
    buffer = ReplayBuffer(str(tmp_path), 100, "t")
    with pytest.raises(ValueError, match="the buffer is empty"):
        replay.plan(JOB, buffer, {}, PROMPT)
    buffer.append(stored("a", [1.0]))
    assert replay.plan(JOB, buffer, {}, PROMPT).schema.equals(schema.STAGES["plan"])


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="use fraction or grid"):
        dataclasses.replace(JOB, cut="middle")
