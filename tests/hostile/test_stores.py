"""Files of a run that are cut short, foreign, doubled or somebody else's: what each gets."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.store.buffer_index import claim
from pipelines.store.replay_buffer import ReplayBuffer, ReplayBufferConfig, ReplayError, check_place
from tests.pipelines.store.test_replay_buffer import ids, row, table

GOOD = {"tokenizer_hash": "tok", "files": ["trajectories-000000000000.parquet"], "latest": [], "oldest": 0, "next": 1}

# What stands in index.json, and what is said of it.
INDEXES = {
    "empty": ("", "cannot be read as JSON"),
    "cut short": (json.dumps(GOOD)[:-9], "cannot be read as JSON"),
    "binary": ("\x00\x01", "cannot be read as JSON"),
    "deeply nested": ("[" * 100_000, "cannot be read as JSON"),
    "a list": ("[]", "holds no index"),
    "null": ("null", "holds no index"),
    "a number": ("3", "holds no index"),
    "without files": (json.dumps({**GOOD, "files": None}), "files is missing"),
    "without a tokenizer": (json.dumps({k: v for k, v in GOOD.items() if k != "tokenizer_hash"}), "tokenizer_hash is missing"),
    "a count of text": (json.dumps({**GOOD, "next": "1"}), "next is missing or no int"),
    "a count that is true": (json.dumps({**GOOD, "oldest": True}), "oldest is missing or no int"),
    "a file above": (json.dumps({**GOOD, "files": ["../secret.parquet"]}), "names the file '../secret.parquet'"),
    "an absolute file": (json.dumps({**GOOD, "files": ["/etc/passwd"]}), "names the file '/etc/passwd'"),
    "a file in a folder": (json.dumps({**GOOD, "files": ["a/trajectories-000000000000.parquet"]}), "names the file 'a/"),
    "a file of another name": (json.dumps({**GOOD, "files": ["index.json"]}), "names the file 'index.json'"),
    "a name with a null": (json.dumps({**GOOD, "files": ["trajectories-000000000000.parquet\0"]}), "names the file"),
    "without the latest": (json.dumps({**GOOD, "latest": None}), "latest is missing"),
    "a latest above": (json.dumps({**GOOD, "latest": ["../secret.parquet"]}), "names the file '../secret.parquet'"),
    "a latest of the buffer": (json.dumps({**GOOD, "latest": GOOD["files"]}), "names a file twice"),
    "a file twice": (json.dumps({**GOOD, "files": GOOD["files"] * 2}), "names a file twice"),
    "a file that is a number": (json.dumps({**GOOD, "files": [0]}), "names the file 0"),
}


@pytest.mark.parametrize(("text", "message"), INDEXES.values(), ids=INDEXES.keys())
def test_an_index_is_checked_before_it_is_believed(tmp_path, text, message):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ReplayError, match=message):
        check_place(ReplayBufferConfig(None, str(tmp_path)), "tok", str(tmp_path / "run"))


def changed(file: Path, change) -> None:
    pq.write_table(change(pq.read_table(file)), file)


FILES = {
    "missing rows": lambda file: changed(file, lambda table: table.slice(1)),
    "doubled rows": lambda file: changed(file, lambda table: pa.concat_tables([table, table])),
    "a row twice": lambda file: changed(file, lambda table: table.take([0, 0, 1])),
    "no rows": lambda file: file.write_bytes(b""),
    "cut short": lambda file: os.truncate(file, 90),
    "another format": lambda file: file.write_text("problem_id,response\n"),
    "null sequences": lambda file: changed(file, lambda t: t.set_column(0, "sequence", pa.nulls(t.num_rows, pa.int64()))),
    "null lengths": lambda file: changed(
        file, lambda t: t.set_column(t.schema.get_field_index("response_length"), "response_length", pa.nulls(3, pa.int32()))
    ),
    "another schema": lambda file: pq.write_table(pa.table({"a": [1]}), file),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", FILES.values(), ids=FILES.keys())
def test_a_damaged_file_is_named_and_the_rest_serves(tmp_path, damage):
    buffer = ReplayBuffer(str(tmp_path), 100, "tok")
    for start in (0, 3, 6):
        buffer.append(table(*(row(i) for i in range(start, start + 3))))
    name = buffer.state()["files"][1]
    damage(tmp_path / name)
    again = ReplayBuffer(str(tmp_path), 100, "tok", buffer.state())
    assert ids(again) == ["p0", "p1", "p2", "p6", "p7", "p8"]
    (skipped,) = again.skipped
    assert name in skipped
    again.append(table(row(9)))
    assert name in again.state()["files"]  # it may be readable again
    assert not again.collect([])


def test_a_transient_error_costs_no_trajectory(tmp_path, monkeypatch):
    buffer = ReplayBuffer(str(tmp_path), 100, "tok")
    for i in range(3):
        buffer.append(table(row(i)))
    away, name = tmp_path / "away", buffer.state()["files"][1]
    (tmp_path / name).rename(away)
    again = ReplayBuffer(str(tmp_path), 100, "tok", buffer.state())
    again.append(table(row(3)))
    away.rename(tmp_path / name)
    assert ids(ReplayBuffer(str(tmp_path), 100, "tok", again.state())) == ["p0", "p1", "p2", "p3"]


def test_a_file_that_has_left_the_buffer_leaves_the_index_too(tmp_path):
    buffer = ReplayBuffer(str(tmp_path), 2, "tok")
    buffer.append(table(row(0)))
    (tmp_path / buffer.state()["files"][0]).unlink()
    again = ReplayBuffer(str(tmp_path), 2, "tok", buffer.state())
    for i in range(1, 4):
        again.append(table(row(i)))
    assert len(again.state()["files"]) == 2


def test_a_buffer_has_one_writer(tmp_path):
    url = str(tmp_path / "shared")
    check_place(ReplayBufferConfig(url, None), "tok", "/runs/none")  # one that is refused later leaves no claim
    check_place(ReplayBufferConfig(url, None), "tok", "/runs/one")
    claim(url, "/runs/one")
    check_place(ReplayBufferConfig(url, None), "tok", "/runs/one")  # a resume
    with pytest.raises(ReplayError, match="the run in /runs/one writes there"):
        check_place(ReplayBufferConfig(url, None), "tok", "/runs/two")
    (tmp_path / "shared/owner.json").write_text("{")
    with pytest.raises(ReplayError, match="remove it if no run writes"):
        check_place(ReplayBufferConfig(url, None), "tok", "/runs/one")


@pytest.mark.parametrize("same", ["{0}", "{0}/", "{0}/../replay", "file://{0}"])
def test_a_buffer_is_not_copied_onto_itself(tmp_path, same):
    folder = tmp_path / "replay"
    buffer = ReplayBuffer(str(folder), 10, "tok")
    buffer.append(table(row(0)))
    for url in (str(folder), None):
        with pytest.raises(ReplayError, match="this run's own buffer"):
            check_place(ReplayBufferConfig(url, same.format(folder)), "tok", str(tmp_path))
    assert ids(ReplayBuffer(str(folder), 10, "tok", buffer.state())) == ["p0"]
