import json

import pytest

from pipelines.store import checkpoint
from pipelines.store.whole_file import write_atomically
from pipelines.trainer.config import CheckpointConfig


def make(run, step, score=None, manifest=True):
    path = checkpoint.folder(str(run), step)
    (path / "state").mkdir(parents=True)
    if manifest:
        write_atomically(path / checkpoint.MANIFEST, json.dumps({"step": step, "score": score, "model": "m"}))
    return path


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    good, torn = make(tmp_path, 1), make(tmp_path, 2, manifest=False)
    assert checkpoint.complete(str(tmp_path)) == [good]
    with pytest.raises(checkpoint.CheckpointError, match="not a complete checkpoint"):
        checkpoint.read_manifest(torn)


def test_newest_and_best_stay(tmp_path):
    paths = [make(tmp_path, step, score) for step, score in [(1, 0.2), (2, 0.9), (3, 0.5), (4, 0.6), (5, None)]]
    dropped = checkpoint.prune(str(tmp_path), CheckpointConfig(every=1, keep_last=2, keep_best=1))
    assert checkpoint.complete(str(tmp_path)) == [paths[1], paths[3], paths[4]]
    assert [path.exists() for path in dropped] == [False, False]


def test_another_model_is_refused(tmp_path):
    path = make(tmp_path, 1)
    checkpoint.check_fits(path, {"model": "m"})
    with pytest.raises(checkpoint.CheckpointError, match="made with model 'm', but this run has 'other'"):
        checkpoint.check_fits(path, {"model": "other"})


def test_named_steps_are_due_and_stay(tmp_path):
    config = CheckpointConfig(every=10, keep_last=1, keep_best=0, keep_steps=(2, 7))
    assert [step for step in range(1, 21) if config.due(step)] == [2, 7, 10, 20]
    assert not any(CheckpointConfig(every=0, keep_last=1, keep_best=0).due(step) for step in range(1, 9))
    paths = [make(tmp_path, step) for step in (2, 7, 10, 20)]
    checkpoint.prune(str(tmp_path), config)
    assert checkpoint.complete(str(tmp_path)) == [paths[0], paths[1], paths[3]]
