import importlib.util
import json
import shutil

import pytest
from omegaconf import OmegaConf

from pipelines.command.entry import command
from pipelines.config.compose import CONF, compose
from pipelines.config.make import ConfigError
from tests.conftest import configure


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.group_sise=4", "algorithm.group_size"),
        ("steeps=4", "steps"),
        ("algorithm=grop", "did you mean grpo"),
        ("task=chain", "chain_arithmetic"),
        ("steps", "key=value"),
        ("steps=many", "expected int"),
        ("steps=0", "at least 1"),
        ("optimizer.schedule=linear", "constant or cosine"),
        ("sampling.top_p=0.9", "training samples the whole distribution"),
        ("task.max_new_tokens=2000", "context of 1024"),
        ("cluster.learner.max_tokens_per_microbatch=64", "max_tokens_per_microbatch=64 cannot hold"),
        ("model.path=nowhere", "no config.json"),
        ("model=folder", "model.path"),
        ("task.train.world=null", "exactly one"),
        ("algorithm=ac2 task.reward_range=[-1.0,1.0]", "the critic of algorithm=ac2 gives values from 0 to 1; scale"),
        ("algorithm=ac2 task.reward_range=null reward.path=a.py reward.name=f", "nothing says that the reward function does"),
        ("algorithm=ac2 algorithm.max_new_tokens=1", "chunk_tokens=16: not below the response budget of 1"),
        ("algorithm=prefix_grpo algorithm.max_new_tokens=1", "cut_grid=16: not even a response of 1 tokens"),
        ("task.answer.form=boxd", "task.answer.form=boxd: use one of null, boxed"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(override, message):
    with pytest.raises(ValueError, match=message) as error:
        configure(*override.split())
    assert "\n" not in str(error.value)


def test_a_folder_without_tokenizer_is_refused(tmp_path, random_model):
    shutil.copy(f"{random_model}/config.json", tmp_path)
    with pytest.raises(ValueError, match="no tokenizer"):
        configure(f"model.path={tmp_path}")


def test_engines_on_cpus_need_bfloat16_and_torchvision_for_models_of_qwen35s_kind(tmp_path, random_model, monkeypatch):
    shutil.copytree(random_model, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    sizes = {
        f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    }
    text = config | sizes | {"linear_conv_kernel_dim": 2, "layer_types": ["linear_attention", "full_attention"] * 2}
    (tmp_path / "m/config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    with pytest.raises(ConfigError, match=r"model\.dtype=float32: the engines run this model's gated delta nets"):
        configure(f"model.path={tmp_path}/m")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="sees pictures with torchvision, which is not here"):
        configure(f"model.path={tmp_path}/m", "model.dtype=bfloat16")


def test_every_choice_composes():
    for group in ("algorithm", "task", "cluster", "experiment"):
        for file in (CONF / group).glob("*.yaml"):
            assert OmegaConf.to_yaml(compose([f"{group}={file.stem}"]))


def test_an_experiment_overrides_the_defaults_and_the_command_line_overrides_it():
    assert configure("experiment=demo").steps == 15
    assert configure("experiment=demo").tracking.experiment == "demo"
    assert configure("experiment=demo", "steps=3").steps == 3


def test_variants_differ_only_in_their_fields():
    base, dapo = configure().algorithm, configure("algorithm=dapo").algorithm
    changed = {name for name in vars(base) if getattr(base, name) != getattr(dapo, name)}
    assert changed == {"name", "normalize_std", "dynamic_sampling", "max_rounds", "overlong_filter"}


def test_commands_print_help_configuration_and_errors(capsys):
    assert command("pipelines.train", ["--help"], "usage text", "config", lambda tree: None) == 0
    assert "usage text" in capsys.readouterr().out
    assert command("pipelines.train", ["--cfg", "job", "steps=7"], "", "config", lambda tree: None) == 0
    assert "steps: 7" in capsys.readouterr().out
    assert command("pipelines.train", ["steeps=7"], "", "config", lambda tree: None) == 2
    assert capsys.readouterr().err == "error: steeps: no such key; did you mean steps, seed?\n"
    assert command("pipelines.train", [], "", "config", lambda tree: json.loads("{")) == 2


def test_open_mappings_take_keys_of_the_users_own():
    config = configure("task=reasoning_gym", "+task.options.min_terms=2")
    assert config.task.train.reasoning_gym_options == {"min_terms": 2}


def test_unknown_key_with_plus_is_still_refused():
    with pytest.raises(ConfigError, match="no such key"):
        configure("+algorithm.group_sise=4")


def test_adapters_and_replay_are_nested_settings():
    lora = configure("model.lora={rank:4,alpha:8,target_modules:[q_proj,v_proj]}").model.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (4, 8, ["q_proj", "v_proj"])
    assert configure("model.lora={rank:4,alpha:8,target_modules:all-linear}").model.lora.target_modules == "all-linear"
    with pytest.raises(ConfigError, match=r"model\.lora\.ranks: no such key; did you mean rank"):
        configure("model.lora={ranks:4,alpha:8,target_modules:all-linear}")
    with pytest.raises(ConfigError, match=r"algorithm\.replay\.capacity=many: expected int"):
        configure("algorithm=prefix_grpo", "algorithm.replay.capacity=many")
    with pytest.raises(ConfigError, match="replays nothing"):
        configure("replay_buffer.start_from=/elsewhere")


def test_a_sweep_runs_every_combination_and_says_which_failed(monkeypatch, capsys):
    from pipelines.command import entry

    started = []

    def process(arguments):
        started.append(arguments[3:])
        return 1 if "seed=1" in arguments else 0

    monkeypatch.setattr(entry, "_passing_signals", process)
    status = entry.command(
        "pipelines.train", ["--multirun", "algorithm=ppo,easyppo", "seed=0,1", "steps=2"], "", "config", run=lambda tree: None
    )
    wanted = [[f"algorithm={name}", f"seed={seed}", "steps=2"] for name in ("ppo", "easyppo") for seed in (0, 1)]
    assert (status, started) == (1, wanted)
    assert "2 of 4 runs failed: algorithm=ppo seed=1 steps=2; algorithm=easyppo seed=1 steps=2" in capsys.readouterr().err
    assert entry.command("pipelines.train", ["--multirun", "algorithm=ppo,nope"], "", "config", run=lambda tree: None) == 2
    assert "there is no such file in conf/algorithm" in capsys.readouterr().err
    assert len(started) == 4  # all are composed before the first is started


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            ["experiment=aime", "task=number_walk"],
            "sets task.max_prompt_tokens=2048 where task=number_walk sets 32",
        ),
        (["experiment=mine", "algorithm=easyppo"], "sets algorithm.critic.minibatches=1 where algorithm=easyppo sets 4"),
    ],
)
def test_a_choice_that_an_experiment_would_undo_is_refused(choices, message, tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nalgorithm:\n  critic:\n    minibatches: 1\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose(choices, own_conf=str(tmp_path))
    # Said on the command line it is meant.
    if "experiment=mine" in choices:
        compose([*choices, "algorithm.critic.minibatches=2"], own_conf=str(tmp_path))


def test_a_folder_of_ones_own_adds_choices(tmp_path, capsys):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "bold.yaml").write_text("defaults: [grpo, _self_]\nname: bold\nclip_high: 0.5\n")
    options = ["--config-dir", str(tmp_path), "--cfg", "job", "algorithm=bold"]
    assert command("pipelines.train", options, "", "config", lambda tree: None) == 0
    assert "clip_high: 0.5" in capsys.readouterr().out
    assert command("pipelines.train", ["--config-dir"], "", "config", lambda tree: None) == 2
    assert "--config-dir: give it a value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere.Mine", "cannot be imported"), ("algorithms.grpo.Mine", "cannot be imported"), ("pathlib.Path", "not a subclass")],
)
def test_an_implementation_that_is_no_algorithm_is_named(path, message):
    with pytest.raises(ConfigError, match=f"algorithm.implementation={path}: {message}"):
        configure(f"algorithm.implementation={path}")
