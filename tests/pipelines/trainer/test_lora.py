"""Adapters: only they are trained, engines get merged weights, and ranks and splits change nothing."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.store import checkpoint
from pipelines.trainer import policy as model_module
from pipelines.trainer import state as train_state
from pipelines.trainer.config import LoRAConfig, ModelConfig
from pipelines.trainer.learner import Learner
from tests.conftest import configure
from tests.distributed import run_ranks
from tests.learner_parts import OPTIMIZER, TEMPERATURE, credited, make_groups, share

pytestmark = pytest.mark.slow

LORA = LoRAConfig(rank=4, alpha=8.0, target_modules=["q_proj", "down_proj"])


def make_learner(folder):
    model = ModelConfig(folder, "float32", False, LORA)
    return Learner(model, OPTIMIZER, temperature=TEMPERATURE, horizon=40, max_tokens=4096, device=torch.device("cpu"))


def updated(folder):
    """Merged weights before and after two updates: a first one moves only the adapters' zero half."""
    learner = make_learner(folder)
    before = model_module.full_state_dict(learner.policy, torch.float32)
    metrics = [configure().algorithm.update(learner, share(credited(make_groups()))) for _ in range(2)]
    after = model_module.full_state_dict(learner.policy, torch.float32)
    trainable = sorted(n for n, p in learner.policy.named_parameters() if p.requires_grad)
    return {"before": before, "after": after, "trainable": trainable, "losses": [m["actor/pg_loss"] for m in metrics]}


def saved(folder, path):
    """A checkpoint after an update; the merged weights and the log-probabilities of this rank's sequences."""
    learner = make_learner(folder)
    configure().algorithm.update(learner, share(credited(make_groups())))
    train_state.save(learner, path, {}, {"step": 1})
    return model_module.full_state_dict(learner.policy, torch.float32)


def restored(folder, path):
    learner = make_learner(folder)
    train_state.load(learner, path)
    return model_module.full_state_dict(learner.policy, torch.float32)


def test_only_adapters_are_trained_and_only_their_layers_change(random_model):
    (result,) = run_ranks(updated, 1, random_model)
    original = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32).state_dict()
    assert all(".lora_" in name for name in result["trainable"])
    assert len(result["trainable"]) == 2 * 2 * 4  # two matrices, two layers of each of four blocks
    for name, before in result["before"].items():
        assert torch.equal(before, original[name]), name
        adapted = "q_proj" in name or "down_proj" in name
        assert torch.equal(before, result["after"][name]) != adapted, name


def test_two_ranks_agree_with_one(random_model):
    (one,), (two, _) = run_ranks(updated, 1, random_model), run_ranks(updated, 2, random_model)
    assert np.allclose(one["losses"], two["losses"], atol=1e-5)
    for name, value in one["after"].items():
        assert torch.allclose(value, two["after"][name], atol=1e-5), name


def test_a_checkpoint_has_merged_weights_and_the_adapters_alone(random_model, tmp_path):
    path = tmp_path / "step_000001"
    merged, _ = run_ranks(saved, 2, random_model, path)
    (again,) = run_ranks(restored, 1, random_model, path)
    assert checkpoint.read_manifest(path)["step"] == 1
    opened = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32).state_dict()
    for name, value in merged.items():
        assert torch.equal(opened[name], value), name
        assert torch.allclose(again[name], value, atol=1e-7), name
    assert json.loads((path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    peft_merged = PeftModel.from_pretrained(base, str(path / "adapter")).merge_and_unload().state_dict()
    for name, value in merged.items():
        assert torch.allclose(peft_merged[name], value, atol=1e-6), name
