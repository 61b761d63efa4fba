"""The trainer's part of a checkpoint: sharded weights and optimizer, and the model as a plain Hugging Face folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from pipelines.checkpoint import MANIFEST, read_manifest, write_atomically, write_coordinator
from pipelines.learner import Learner
from pipelines.model import adapter_config, full_state_dict
from pipelines.settings import LoRAConfig

MODEL, STATE, ADAPTER = "model", "state", "adapter"
CARRIED = ("config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt")


def save(learner: Learner, path: Path, model_path: str, coordinator: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Write model, optimizer and coordinator, then the manifest; collective. Rank 0 passes the coordinator's state."""
    stepped = learner.critic_optimizer is not None and bool(learner.critic_optimizer.state)
    dcp.save(_trained_state(learner, stepped), checkpoint_id=str(path / STATE))
    save_model_folder(learner, path / MODEL, model_path)
    if learner.model.lora is not None:
        _save_adapters(learner, path / ADAPTER, learner.model.lora)
    if dist.get_rank() == 0:
        write_coordinator(path, coordinator)
        write_atomically(path / MANIFEST, json.dumps(manifest | {"updates": learner.updates}, indent=1))
    dist.barrier()


def save_model_folder(learner: Learner, path: Path, model_path: str) -> None:
    """The policy as a plain Hugging Face folder with the tokenizer of the model it began as; collective."""
    weights = full_state_dict(learner.policy, torch.float32)
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
        for file in Path(model_path).iterdir():
            if file.name in CARRIED or file.name.startswith("tokenizer"):
                shutil.copy(file, path / file.name)


def _save_adapters(learner: Learner, path: Path, lora: LoRAConfig) -> None:
    """The adapters alone, as `peft.PeftModel.from_pretrained` opens them beside the model they belong to; collective."""
    state = {name: value for name, value in learner.policy.state_dict().items() if ".lora_" in name}
    full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        adapter_config(lora).save_pretrained(path)
        named = {f"base_model.model.{k.removeprefix('lm.').replace('.default', '')}": v.cpu().contiguous() for k, v in full.items()}
        save_file(named, str(path / "adapter_model.safetensors"), metadata={"format": "pt"})


def load(learner: Learner, path: str | Path) -> None:
    """Restore weights, optimizers and update count, on any number of ranks; collective.

    A checkpoint without the state of a critic's optimizer leaves that as it is: new.
    """
    reader = dcp.FileSystemReader(str(Path(path) / STATE))
    has_critic = any(name.startswith("critic_optimizer") for name in reader.read_metadata().state_dict_metadata)
    state = _trained_state(learner, has_critic and learner.critic_optimizer is not None)
    dcp.load(state, storage_reader=reader)
    set_state_dict(learner.policy, learner.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if learner.critic_optimizer is not None and "critic_optimizer" in state:
        set_optimizer_state_dict(learner.policy, learner.critic_optimizer, state["critic_optimizer"])
    learner.updates = read_manifest(path)["updates"]


def _trained_state(learner: Learner, with_critic: bool) -> dict[str, Any]:
    model, optimizer = get_state_dict(learner.policy, learner.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if with_critic:
        assert learner.critic_optimizer is not None
        state["critic_optimizer"] = get_optimizer_state_dict(learner.policy, learner.critic_optimizer)
    return state
