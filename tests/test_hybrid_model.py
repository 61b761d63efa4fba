"""A model of Qwen3.5's kind from end to end: a language model beside a picture encoder, gated delta nets among its layers."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from pipelines.data.tiny_model import SPECIAL, VOCABULARY, build_tokenizer
from pipelines.trainer.value_folder import HEAD
from tests.commands import ONE_ENGINE, alone, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,  # what vLLM's kernels for CPUs take
    "linear_value_head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": SPECIAL.index("<|end|>"),
    "pad_token_id": SPECIAL.index("<|pad|>"),
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
PICTURES = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
SMALL = [
    "model=folder",
    "model.dtype=bfloat16",  # the CPU kernels of gated delta nets know no other
    "algorithm.problems_per_step=4",
    "algorithm.group_size=4",
    "task.train.count=16",
    "task.validation.count=4",
    "task.max_new_tokens=32",
    "evaluation.every=0",
    "checkpoint.every=1",
    "tracking.system_metrics=false",
    ONE_ENGINE,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "model"
    torch.manual_seed(0)
    vision = VISION | {"num_position_embeddings": 16, "spatial_merge_size": 2, "temporal_patch_size": 1}
    config = Qwen3_5Config(text_config=TEXT, vision_config=vision, tie_word_embeddings=True, **PICTURES)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    stand_ins = str(Path(__file__).parent / "stand_ins")
    return alone() | {"PYTHONPATH": os.pathsep.join([stand_ins, *filter(None, [os.environ.get("PYTHONPATH")])])}


def train(folder: Path, output: Path, environment: dict[str, str], *settings: str) -> dict[int, dict[str, float]]:
    """Run, and return the metrics of each step."""
    reward = folder.parent / "reward.py"
    reward.write_text("def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n")
    own = [f"model.path={folder}", f"output_dir={output}", f"tracking.uri=sqlite:///{folder.parent}/mlflow.db"]
    run("pipelines.train", *SMALL, *own, f"reward.path={reward}", "reward.name=score", *settings, environment=environment)
    lines = [json.loads(line) for line in (output / "mlflow.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "metrics"]
    return {line["step"]: line["values"] for line in found if "actor/grad_norm" in line["values"]}


def test_grpo_trains_it_and_its_checkpoint_opens_again(folder, environment, tmp_path):
    output = tmp_path / "run"
    metrics = train(folder, output, environment, "algorithm=grpo", "steps=2", "optimizer.lr=1e-3")
    assert metrics[1]["actor/grad_norm"] > 0
    assert metrics[2]["training/rollout_probs_diff_mean"] < 0.02  # engine and trainer agree after a sync, to bfloat16
    assert metrics[2]["decode/flops"] > 0
    model = output / "checkpoints/step_000002/model"
    before, after = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert torch.equal(value, before[name]) == ("language_model" not in name), name
    opened = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert torch.equal(opened.model.layers[0].linear_attn.A_log, after["model.language_model.layers.0.linear_attn.A_log"])
    printed = run(
        "pipelines.evaluate", f"checkpoint={output}", "evaluation.n=1", "model.dtype=bfloat16", ONE_ENGINE, environment=environment
    )
    assert "mean@1" in printed


def test_ppo_trains_it_with_a_value_model_of_its_own_and_goes_on(folder, environment, tmp_path):
    output = tmp_path / "run"
    settings = ("algorithm=easyppo", "algorithm.critic.warmup_steps=0")
    first = train(folder, output, environment, *settings, "steps=1")
    assert first[1]["critic/grad_norm"] > 0
    critic = output / "checkpoints/step_000001/critic"
    assert json.loads((critic / "config.json").read_text())["model_type"] == "qwen3_5_text"
    assert (critic / HEAD).is_file()
    again = train(folder, output, environment, f"resume={output}", "steps=2")
    assert sorted(again) == [1, 2]
    other = train(folder, tmp_path / "other", environment, *settings, "steps=1", f"algorithm.critic.path={critic}")
    assert other[1]["critic/grad_norm"] > 0
