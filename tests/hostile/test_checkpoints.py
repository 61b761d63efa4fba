"""Checkpoints that are cut short, foreign or hostile, and writes that fail half-way."""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp

from pipelines.store.checkpoint import (
    CheckpointConfig,
    CheckpointError,
    complete,
    prune,
    read_coordinator_whole,
    read_manifest,
    write_coordinator,
)
from pipelines.store.whole_file import write_atomically
from pipelines.trainer.safe_state import SafeReader, load_state
from tests.hostile.test_stores import INDEXES

pytestmark = pytest.mark.slow

MEMORY = {"values": {}, "arrays": {"a": np.ones(3)}}
STATE = {"step": 1, "cursor": {}, "totals": {}, "evaluations": {}, "replay": None, "memory": MEMORY}
BROKEN = {name: text for name, (text, _) in INDEXES.items() if "JSON" in INDEXES[name][1] or "no index" in INDEXES[name][1]}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("name", ["manifest.json", "coordinator.json"])
def test_a_file_that_is_no_mapping_is_named(tmp_path, name, text):
    write_coordinator(tmp_path, STATE)
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        (read_manifest if name == "manifest.json" else read_coordinator_whole)(tmp_path)


@pytest.mark.parametrize("key", ["step", "cursor", "totals", "evaluations", "replay", "memory"])
def test_a_state_that_lacks_a_part_is_refused(tmp_path, key):
    write_coordinator(tmp_path, {name: value for name, value in STATE.items() if name != key})
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        read_coordinator_whole(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"\x80\x04K\x01.", None])
def test_a_memory_that_cannot_be_read_is_named(tmp_path, damage):
    write_coordinator(tmp_path, STATE)
    file = tmp_path / "memory.npz"
    file.unlink() if damage is None else file.write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"memory\.npz"):
        read_coordinator_whole(tmp_path)


def test_pickled_arrays_are_not_loaded(tmp_path):
    np.savez(tmp_path / "memory.npz", a=np.array([Canary(tmp_path)], object))
    (tmp_path / "coordinator.json").write_text(json.dumps(STATE | {"memory": {"values": {}}}))
    with pytest.raises(CheckpointError, match=r"memory\.npz"):
        read_coordinator_whole(tmp_path)
    assert not (tmp_path / "canary").exists()


class Canary:
    """Writes a file where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.system, (f"touch {self.folder}/canary",)


def saved(path: Path) -> Path:
    """Sharded state of one tensor and one value that is none."""
    dcp.save({"weight": torch.arange(4.0), "rate": 0.5}, checkpoint_id=str(path), no_dist=True)
    return path


def loaded(path: Path) -> dict:
    state, reader = {"weight": torch.zeros(4), "rate": 0.0}, SafeReader(str(path))
    reader.read_metadata()  # as the trainer does first
    load_state(state, reader)
    return state


def test_state_is_read_as_it_was_written(tmp_path):
    state = loaded(saved(tmp_path / "state"))
    assert (state["weight"].tolist(), state["rate"]) == ([0, 1, 2, 3], 0.5)


@pytest.mark.parametrize("metadata", ["code", "list", "empty", "short", "elsewhere", "above"])
def test_foreign_state_runs_nothing(tmp_path, metadata):
    file = saved(tmp_path / "state") / ".metadata"
    whole = pickle.loads(file.read_bytes())
    if metadata == "elsewhere":
        for info in whole.storage_data.values():
            info.relative_path = "/etc/passwd"
    if metadata == "above":
        for info in whole.storage_data.values():
            info.relative_path = "../other.distcp"
    text = {
        "code": pickle.dumps(Canary(tmp_path)),
        "list": pickle.dumps([1]),
        "empty": b"",
        "short": file.read_bytes()[:-20],
    }.get(metadata, pickle.dumps(whole))
    file.write_bytes(text)
    with pytest.raises(CheckpointError, match="cannot be read safely"):
        loaded(tmp_path / "state")
    assert not (tmp_path / "canary").exists()


def test_values_that_are_no_tensors_run_nothing_either(tmp_path):
    dcp.save({"weight": torch.zeros(4), "rate": Canary(tmp_path)}, checkpoint_id=str(tmp_path / "state"), no_dist=True)
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        loaded(tmp_path / "state")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("score", [None, float("nan"), float("inf"), float("-inf")])
def test_the_best_checkpoint_is_one_with_a_score(tmp_path, score):
    for step, value in ((1, 0.9), (2, score), (3, 0.1), (4, 0.2)):
        folder = tmp_path / f"checkpoints/step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"score": value}))
    prune(str(tmp_path), CheckpointConfig(1, keep_last=1, keep_best=1))
    assert [path.name for path in complete(str(tmp_path))] == ["step_000001", "step_000004"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "manifest.json"
    write_atomically(file, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "new")
    assert file.read_text() == "old"


FULL = """
import sys
import pyarrow as pa
from pipelines.store.rollouts import write_rollouts
from pipelines.store.replay_buffer import ReplayBuffer
from tests.pipelines.store.test_replay_buffer import row, table

what, folder = sys.argv[1:]
if what == "rollouts":
    write_rollouts(folder, 1, pa.table({"a": list(range(1_000_000))}), None)
else:
    buffer = ReplayBuffer(folder, 10, "tok")
    buffer._open(buffer.state() | __import__("json").load(open(folder + "/index.json")))
    buffer.append(table(*(row(i, length=100_000) for i in range(1, 4))))
"""


@pytest.mark.parametrize("what", ["rollouts", "buffer"])
def test_a_full_disk_leaves_no_half_file(tmp_path, what):
    """The size of a file is limited, which fails a write in its middle as a full disk does."""
    from pipelines.store.replay_buffer import ReplayBuffer
    from pipelines.store.rollouts import rollouts_file, write_rollouts
    from tests.pipelines.store.test_replay_buffer import ids, row, table

    write_rollouts(str(tmp_path), 1, pa.table({"a": [1]}), None)
    before = ReplayBuffer(str(tmp_path), 10, "tok")
    before.append(table(row(0)))

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run([sys.executable, "-c", FULL, what, str(tmp_path)], capture_output=True, text=True, preexec_fn=limited)
    assert done.returncode != 0
    assert "File too large" in done.stderr, done.stderr
    assert pq.read_table(rollouts_file(tmp_path, 1)).num_rows == 1
    assert ids(ReplayBuffer(str(tmp_path), 10, "tok", before.state())) == ["p0"]
    assert json.loads((tmp_path / "index.json").read_text()) == before.state()
