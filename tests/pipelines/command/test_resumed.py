"""A resumed run is the run it was: what a command line may change, what it may not, and what it says."""

import json
import subprocess
import sys

import pytest

from pipelines.command.place import place
from pipelines.command.resumed import compose_run, differences, leaves, nested
from pipelines.config.compose import compose, resolved
from pipelines.config.make import ConfigError
from pipelines.config.run import absolute_paths, build
from pipelines.store import checkpoint, run_folder

pytestmark = pytest.mark.slow

COMMAND = ["algorithm=dapo", "optimizer.lr=1e-6", "task=number_walk", "seed=3", "steps=7"]


@pytest.fixture
def run(tmp_path):
    """The folder of a run as the command starts it, with two checkpoints."""
    folder = tmp_path / "run"
    for step in (2, 4):
        checkpoint.folder(str(folder), step).mkdir(parents=True)
        (checkpoint.folder(str(folder), step) / "manifest.json").write_text("{}")
    tree = absolute_paths(resolved(compose(COMMAND))) | {"output_dir": str(folder)}
    run_folder.write_config(folder, tree)
    return folder


def changes(run, *overrides) -> list[str]:
    tree = resolved(compose_run([f"resume={run}", *overrides]))
    return [key for key, _, _ in differences(run_folder.read_config(run), tree)]


def test_nothing_but_the_folder_means_the_run_as_it_was(run):
    tree = resolved(compose_run([f"resume={run}"]))
    assert (tree["algorithm"]["name"], tree["optimizer"]["lr"], tree["seed"], tree["steps"]) == ("dapo", 1e-6, 3, 7)
    assert changes(run) == []
    build(tree)


def test_the_whole_command_again_changes_nothing(run):
    assert changes(run, *COMMAND) == []


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("steps=9", ["steps"]),
        ("steps=60", ["steps"]),  # the default, which is not what the run had
        ("optimizer.lr=1e-5", ["optimizer.lr"]),
        ("evaluation.every=3", ["evaluation.every"]),
        ("checkpoint.keep_last=5", ["checkpoint.keep_last"]),
        ("tracking.run_name=other", ["tracking.run_name"]),
        ("cluster.engines.count=1", ["cluster.engines.count"]),
        ("seed=3", []),
        ("model=tiny", []),
    ],
)
def test_what_may_change_changes_and_is_shown(run, override, changed, capsys):
    assert changes(run, override) == changed
    assert ("resumed with changes" in capsys.readouterr().err) == bool(changed)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("algorithm=grpo", "algorithm."),  # the default: named, so it is meant
        ("algorithm=ac2", "algorithm."),
        ("algorithm.group_size=4", "algorithm.group_size"),
        ("scale.group_size=4", "algorithm.group_size"),
        ("task=chain_arithmetic", "task."),
        ("model.path=other", "model.path"),
        ("seed=0", "seed"),
        ("sampling.temperature=0.7", "sampling.temperature"),
        ("reward.signature=trl", "reward.signature"),
        ("experiment=ac2_paper", "algorithm."),
    ],
)
def test_what_the_run_is_cannot_change(run, override, key):
    with pytest.raises(ConfigError, match="cannot become") as caught:
        compose_run([f"resume={run}", override])
    assert f": {key}" in str(caught.value)
    assert "branch_from" in str(caught.value)


def test_a_checkpoint_names_its_run_and_what_came_after_is_set_aside(run):
    at = checkpoint.folder(str(run), 2)
    config = build(resolved(compose_run([f"resume={at}"])))
    assert place(config) == (str(at), str(run))
    assert [path.name for path in checkpoint.set_aside_later(str(run), str(at))] == ["step_000004"]
    assert [path.name for path in checkpoint.complete(str(run))] == ["step_000002"]
    assert (run / "superseded/step_000004/manifest.json").is_file()


@pytest.mark.parametrize(
    ("text", "message"), [(None, "no config.json"), ("", "cannot be read"), ("{", "cannot be read"), ("[]", "holds")]
)
def test_a_folder_without_its_configuration_is_said(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        compose_run([f"resume={tmp_path}"])


def test_leaves_and_nested_are_opposites():
    tree = {"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}], "f": None}
    assert nested(leaves(tree)) == tree
    assert nested(leaves(json.loads(json.dumps(resolved(compose([])))))) == resolved(compose([]))


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    with run_folder.lock(tmp_path):
        code = f"from pipelines.store import run_folder; run_folder.lock({str(tmp_path)!r})"
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "in use by process" in second.stderr
    third = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)  # a dead run's lock is free
    assert third.returncode == 0, third.stderr


def test_unnamed_runs_of_two_processes_have_two_folders(monkeypatch):
    config = build(resolved(compose([])))
    monkeypatch.setattr("pipelines.command.place.os.getpid", lambda: 1)
    first = place(config)[1]
    monkeypatch.setattr("pipelines.command.place.os.getpid", lambda: 2)
    assert place(config)[1] != first
