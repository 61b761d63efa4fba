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

from pipelines.store.checkpoint import MANIFEST, read_manifest, write_atomically, write_coordinator
from pipelines.trainer.config import LoRAConfig
from pipelines.trainer.learner import Learner
from pipelines.trainer.policy import adapter_config, full_state_dict

MODEL, STATE, ADAPTER, CRITIC = "model", "state", "adapter", "critic"
CARRIED = ("config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt")


def save(learner: Learner, path: Path, model_path: str, coordinator: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Write models, optimizers and coordinator, then the manifest; collective. Rank 0 passes the coordinator's state."""
    stepped = learner.critic_optimizer is not None and bool(learner.critic_optimizer.adamw.state)
    dcp.save(_trained_state(learner, stepped, learner.critic is not None), checkpoint_id=str(path / STATE))
    save_model_folder(learner, path / MODEL, model_path)
    if learner.model.lora is not None:
        _save_adapters(learner, path / ADAPTER, learner.model.lora)
    if learner.critic is not None:
        learner.critic.save(path / CRITIC)
    if dist.get_rank() == 0:
        write_coordinator(path, coordinator)
        counts = {"updates": learner.updates, "batches": learner.batches}
        counts |= {"critic_updates": learner.critic.updates} if learner.critic is not None else {}
        write_atomically(path / MANIFEST, json.dumps(manifest | counts, indent=1))
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
    """Restore weights, optimizers and counts, on any number of ranks; collective.

    A checkpoint without the state of a critic's optimizer, or without a critic model, leaves those as they are: new.
    """
    reader = dcp.FileSystemReader(str(Path(path) / STATE))
    names = reader.read_metadata().state_dict_metadata
    with_optimizer = learner.critic_optimizer is not None and any(name.startswith("critic_optimizer") for name in names)
    with_critic = learner.critic is not None and any(name.startswith("critic_model") for name in names)
    state = _trained_state(learner, with_optimizer, with_critic)
    dcp.load(state, storage_reader=reader)
    manifest = read_manifest(path)
    policy, optimizer = learner.policy, learner.optimizer.adamw
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if learner.critic_optimizer is not None and with_optimizer:
        set_optimizer_state_dict(policy, learner.critic_optimizer.adamw, state["critic_optimizer"])
    if learner.critic is not None and with_critic:
        model, optimizer = learner.critic.model, learner.critic.optimizer.adamw
        set_state_dict(model, optimizer, model_state_dict=state["critic_model"], optim_state_dict=state["critic_model_optimizer"])
        learner.critic.updates = manifest["critic_updates"]
    learner.updates, learner.batches = manifest["updates"], manifest["batches"]


def _trained_state(learner: Learner, with_optimizer: bool, with_critic: bool) -> dict[str, Any]:
    """What a checkpoint holds of the trainer, with an AC2 critic's optimizer and a critic model where asked for."""
    model, optimizer = get_state_dict(learner.policy, learner.optimizer.adamw)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if with_optimizer:
        assert learner.critic_optimizer is not None
        state["critic_optimizer"] = get_optimizer_state_dict(learner.policy, learner.critic_optimizer.adamw)
    if with_critic:
        assert learner.critic is not None
        critic, optimizer = get_state_dict(learner.critic.model, learner.critic.optimizer.adamw)
        state |= {"critic_model": critic, "critic_model_optimizer": optimizer}
    return state
