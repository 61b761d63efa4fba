"""The replay buffer on a disk and behind a URL: first in first out, nothing confirmed lost, another tokenizer refused."""

import os
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.store import replay_buffer
from pipelines.store.replay_buffer import ReplayBuffer, ReplayBufferConfig, ReplayError, check_place, live_rows, tokenizer_hash
from pipelines.store.trajectories import SCHEMA, trajectories


def row(i, length=12, prefix=0):
    rng = np.random.default_rng(i)
    return {
        "problem_id": f"p{i}",
        "data_source": "d",
        "ground_truth": "t",
        "extra_info": "{}",
        "prompt_ids": [1, 2],
        "prefix_len": prefix,
        "response_length": length,
        "response_ids": rng.integers(0, 1000, length).tolist(),
        "rollout_logprobs": rng.standard_normal(length - prefix).tolist(),
        "policy_versions": [{"start": 0, "version": i}],
        "step": i,
        "finish_reason": "stop",
        "reward": None if i % 3 == 0 else 1.0,
        "reward_status": "ok",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": i,
    }


def table(*rows):
    fields = [field for field in SCHEMA if field.name not in ("sequence", "tokenizer_hash")]
    return pa.Table.from_pylist(list(rows), schema=pa.schema(fields))


def ids(buffer):
    return [trajectory.problem_id for trajectory in buffer.trajectories()]


@pytest.fixture(params=["disk", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "replay") if request.param == "disk" else f"memory://{uuid.uuid4().hex}/replay"


def test_first_in_first_out_by_trajectories_and_prefixes_are_what_was_stored(url):
    buffer = ReplayBuffer(url, 5, "tok")
    for start in range(0, 9, 3):
        buffer.append(table(*(row(i) for i in range(start, start + 3))))
    assert ids(buffer) == ["p4", "p5", "p6", "p7", "p8"]
    for i, trajectory in enumerate(buffer.trajectories(), start=4):
        for cut in (0, 1, 7, 12):
            assert buffer.prefix(trajectory, cut) == row(i)["response_ids"][:cut]


def test_pyarrow_reads_what_is_live(url):
    buffer = ReplayBuffer(url, 5, "tok")
    buffer.append(table(*(row(i) for i in range(4))))
    buffer.append(table(*(row(i) for i in range(4, 7))))
    files, oldest = live_rows(url)
    assert len(files) == 2  # the oldest file has two rows that have left: nothing was rewritten
    if not url.startswith("memory"):
        found = ds.dataset(files).to_table(filter=ds.field("sequence") >= oldest)
        assert found["problem_id"].to_pylist() == ["p2", "p3", "p4", "p5", "p6"]


@pytest.mark.engine
def test_ray_data_reads_it(tmp_path, ray_cluster):
    import ray
    from ray.data.expressions import col

    buffer = ReplayBuffer(str(tmp_path), 3, "tok")
    buffer.append(table(*(row(i) for i in range(5))))
    files, oldest = live_rows(str(tmp_path))
    found = ray.data.read_parquet(files).filter(expr=col("sequence") >= oldest).take_all()
    assert sorted(one["problem_id"] for one in found) == ["p2", "p3", "p4"]


def test_a_new_process_finds_the_same_and_goes_on(url):
    buffer = ReplayBuffer(url, 4, "tok")
    buffer.append(table(*(row(i) for i in range(6))))
    again = ReplayBuffer(url, 4, "tok", buffer.state())
    assert again.trajectories() == buffer.trajectories()
    again.append(table(row(6)))
    assert ids(again) == ["p3", "p4", "p5", "p6"]


def test_a_crash_in_mid_write_shows_nothing_and_loses_nothing_confirmed(url, monkeypatch):
    buffer = ReplayBuffer(url, 10, "tok")
    buffer.append(table(row(0)))

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ReplayBuffer, "_write_index", crash)
    with pytest.raises(KeyboardInterrupt):
        buffer.append(table(row(1)))
    monkeypatch.undo()
    again = ReplayBuffer(url, 10, "tok", replay_buffer.read_index(url))
    assert ids(again) == ["p0"]
    again.append(table(row(2)))
    assert ids(again) == ["p0", "p2"]
    assert again.prefix(again.trajectories()[1], 5) == row(2)["response_ids"][:5]


def test_a_file_cut_short_is_skipped_and_named_and_the_rest_serves(tmp_path):
    buffer = ReplayBuffer(str(tmp_path), 10, "tok")
    buffer.append(table(row(0)))
    buffer.append(table(row(1)))
    broken = tmp_path / buffer.state()["files"][0]
    os.truncate(broken, 100)
    again = ReplayBuffer(str(tmp_path), 10, "tok", buffer.state())
    assert ids(again) == ["p1"]
    (skipped,) = again.skipped
    assert broken.name in skipped


def test_another_tokenizer_is_refused_by_its_hash(url):
    buffer = ReplayBuffer(url, 10, "tok")
    buffer.append(table(row(0)))
    check_place(ReplayBufferConfig(None, url), "tok", "run")
    with pytest.raises(ReplayError, match="made with tokenizer tok, but the model's is other"):
        check_place(ReplayBufferConfig(None, url), "other", "run")
    with pytest.raises(ReplayError, match="made with tokenizer tok, but the model's is other"):
        ReplayBuffer.copy_of(url, f"{url}2", 10, "other")
    with pytest.raises(ReplayError, match="no replay buffer there"):
        ReplayBuffer.copy_of(f"{url}/none", f"{url}2", 10, "tok")


def test_another_runs_buffer_can_be_the_start(url):
    source = ReplayBuffer(url, 10, "tok")
    source.append(table(*(row(i) for i in range(4))))
    copy = ReplayBuffer.copy_of(url, f"{url}2", 3, "tok")
    assert ids(copy) == ["p1", "p2", "p3"]
    copy.append(table(row(9)))
    assert ids(copy) == ["p2", "p3", "p9"]
    assert ids(source) == ["p0", "p1", "p2", "p3"]


def test_only_files_that_nothing_names_are_deleted(tmp_path):
    buffer = ReplayBuffer(str(tmp_path), 2, "tok")
    for i in range(4):
        buffer.append(table(row(i) | {"problem_id": "p"}))
    names = sorted(path.name for path in tmp_path.glob("*.parquet"))
    assert len(names) == 4
    assert buffer.collect(kept=[names[1]]) == [names[0]]
    assert sorted(path.name for path in tmp_path.glob("*.parquet")) == names[1:]


def test_the_latest_trajectory_of_each_problem_outlives_the_buffer_and_is_not_sampled(url):
    buffer = ReplayBuffer(url, 2, "tok")
    for i, problem in enumerate("abcab"):
        buffer.append(table(row(i) | {"problem_id": problem}))
    assert ids(buffer) == ["a", "b"]
    view = buffer.state()
    assert (len(view["files"]), len(view["latest"])) == (2, 1)
    assert len(buffer.collect(kept=[])) == 2  # the first of a and of b
    for found in (buffer, ReplayBuffer(url, 2, "tok", view), ReplayBuffer.copy_of(url, f"{url}/copy", 2, "tok", view)):
        latest = found.latest()
        assert {problem: one.sequence for problem, one in latest.items()} == {"a": 3, "b": 4, "c": 2}
        assert found.response(2) == found.prefix(latest["c"], 12) == row(2)["response_ids"]
        assert found.problem(latest["c"]).problem_id == "c"
        assert ids(found) == ["a", "b"]
        assert found.state() == view
    buffer.append(table(row(5) | {"problem_id": "c"}))
    assert buffer.state()["latest"] == ["trajectories-000000000003.parquet"]  # now a has left, and c is back


def test_a_latest_trajectory_that_cannot_be_read_this_time_is_kept(tmp_path):
    buffer = ReplayBuffer(str(tmp_path), 1, "tok")
    for i, problem in enumerate("ab"):
        buffer.append(table(row(i) | {"problem_id": problem}))
    file = tmp_path / "trajectories-000000000000.parquet"
    whole = file.read_bytes()
    file.write_bytes(b"")
    opened = ReplayBuffer(str(tmp_path), 1, "tok", buffer.state())
    assert len(opened.skipped) == 1
    opened.append(table(row(2) | {"problem_id": "b"}))
    assert file.name in opened.state()["latest"]
    opened.collect(kept=[])
    file.write_bytes(whole)
    assert set(ReplayBuffer(str(tmp_path), 1, "tok", opened.state()).latest()) == {"a", "b"}


def test_log_probabilities_belong_to_new_tokens_only(url):
    buffer = ReplayBuffer(url, 2, "tok")
    buffer.append(table(row(0, length=12, prefix=5)))
    with pytest.raises(ReplayError, match="one log-probability per new token"):
        buffer.append(table(row(1, length=12, prefix=5) | {"rollout_logprobs": [0.0] * 12}))
    with pytest.raises(ReplayError, match="response_length"):
        buffer.append(table(row(1) | {"response_length": 3}))
    assert ids(buffer) == ["p0"]


def test_a_sample_reads_its_row_group_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_buffer, "ROW_GROUP_TOKENS", 30)
    buffer = ReplayBuffer(str(tmp_path), 100, "tok")
    buffer.append(table(*(row(i, length=length) for i, length in enumerate([12, 12, 12, 50, 12, 5]))))
    replay_buffer._read_row_group.cache_clear()
    trajectories = buffer.trajectories()
    assert [buffer._places[t.sequence].row_group for t in trajectories] == [0, 0, 1, 2, 3, 3]
    for i, trajectory in enumerate(trajectories):
        assert buffer.prefix(trajectory, 4) == row(i, length=trajectory.length)["response_ids"][:4]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 9))
def test_whatever_is_appended_the_newest_are_kept(sizes, capacity):
    buffer, appended = ReplayBuffer(f"memory://{uuid.uuid4().hex}", capacity, "tok"), 0
    for size in sizes:
        buffer.append(table(*(row(appended + i, length=3) for i in range(size))))
        appended += size
        assert ids(buffer) == [f"p{i}" for i in range(max(0, appended - capacity), appended)]
        assert ids(ReplayBuffer(buffer.url, capacity, "tok", replay_buffer.read_index(buffer.url))) == ids(buffer)


def test_the_hash_follows_the_vocabulary_and_not_the_template(random_model):
    from pipelines.data.prompts import load_tokenizer

    tokenizer, other = load_tokenizer(random_model), load_tokenizer(random_model)
    other.chat_template = "{{ messages }}"
    assert tokenizer_hash(tokenizer) == tokenizer_hash(other)
    other.add_tokens(["<new>"])
    assert tokenizer_hash(tokenizer) != tokenizer_hash(other)


def test_judged_rows_become_trajectories_with_their_prefix():
    judged = pa.Table.from_pylist(
        [
            {
                "row_id": 5 + i,
                "step": 2,
                "problem_id": f"p{i}",
                "data_source": "d",
                "ground_truth": "t",
                "extra_info": "{}",
                "prompt_ids": [1],
                "prefix_ids": prefix,
                "policy_version": 7,
                "seed": i,
                "response_ids": [[8, 9]],
                "rollout_logprobs": [[-1.0, -2.0]],
                "finish_reason": ["length"],
                "reward": [None],
                "reward_status": ["timeout"],
            }
            for i, prefix in enumerate([[3, 4], []])
        ]
    )
    made = trajectories(judged, {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "other": 1}).to_pylist()
    assert [(t["response_ids"], t["prefix_len"], t["response_length"]) for t in made] == [([3, 4, 8, 9], 2, 4), ([8, 9], 0, 2)]
    assert made[0]["policy_versions"] == [{"start": 0, "version": 7}]
    assert (made[0]["reward"], made[0]["reward_status"], made[0]["finish_reason"]) == (None, "timeout", "length")
    buffer = ReplayBuffer(f"memory://{uuid.uuid4().hex}", 5, "tok")
    buffer.append(trajectories(judged, {"temperature": 0.8, "top_p": 1.0, "top_k": -1}))
    assert buffer.prefix(buffer.trajectories()[0], 3) == [3, 4, 8]
