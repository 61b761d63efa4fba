"""The trainer's part of a checkpoint: sharded weights and optimizers, and the models as plain Hugging Face folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from pipelines.store.checkpoint import MANIFEST, read_manifest, write_coordinator
from pipelines.store.whole_file import sync_tree, write_atomically
from pipelines.trainer.config import LoRAConfig
from pipelines.trainer.learner import Learner
from pipelines.trainer.policy import adapter_config, full_state_dict
from pipelines.trainer.safe_state import SafeReader, load_state
from pipelines.trainer.value_model import ValueModel, save_value_model

MODEL, STATE, ADAPTER, VALUE_MODEL = "model", "state", "adapter", "critic"
CARRIED = ("config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt")


def save(learner: Learner, path: Path, coordinator: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Write models, optimizers and coordinator, then the manifest; collective. Rank 0 passes the coordinator's state."""
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        (path / MANIFEST).unlink(missing_ok=True)  # while it is written anew it is no checkpoint
    dist.barrier()
    stepped = [name for name, optimizer in learner.optimizers.items() if optimizer.adamw.state]
    dcp.save(_trained_state(learner, _trained_models(learner), stepped), checkpoint_id=str(path / STATE))
    save_model_folder(learner, path / MODEL)
    if learner.model.lora is not None:
        _save_adapters(learner, path / ADAPTER, learner.model.lora)
    if isinstance(value_model := learner.models.get("value"), ValueModel):
        assert learner.value_model is not None
        save_value_model(value_model, path / VALUE_MODEL, learner.value_model.path or learner.model.path)
    if dist.get_rank() == 0:
        write_coordinator(path, coordinator)
        sync_tree(path)
        counts = {"updates": learner.updates, "stepped": learner.stepped, "batches": learner.batches}
        write_atomically(path / MANIFEST, json.dumps(manifest | counts, indent=1))
    dist.barrier()


def save_model_folder(learner: Learner, path: Path) -> None:
    """The policy as a plain Hugging Face folder with the tokenizer of the model it began as; collective."""
    weights = full_state_dict(learner.policy, torch.float32)
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        weights |= _untrained_parts(learner)
        save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
        for file in Path(learner.model.path).iterdir():
            if file.name in CARRIED or file.name.startswith("tokenizer"):
                shutil.copy(file, path / file.name)


def _untrained_parts(learner: Learner) -> dict[str, torch.Tensor]:
    """Weights of the folder that the trainer has not opened: a picture encoder's, where the language model is one part of it."""
    prefix = learner.policy.prefix
    if prefix == "model.":
        return {}
    files = sorted(Path(learner.model.path).glob("*.safetensors"))
    return {k: v for file in files for k, v in load_file(file).items() if not k.startswith((prefix, "lm_head."))}


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
    """Restore models, optimizers and counts, on any number of ranks; collective.

    A model or an optimizer that the checkpoint does not have stays as it is: new.
    """
    reader = SafeReader(str(Path(path) / STATE))
    saved = list(reader.read_metadata().state_dict_metadata)

    def known(names: list[str], kind: str) -> list[str]:
        return [name for name in names if any(key.startswith(f"{kind}.{name}.") for key in saved)]

    models, optimizers = known(_trained_models(learner), "models"), known(list(learner.optimizers), "optimizers")
    state = _trained_state(learner, models, optimizers)
    load_state(state, reader)
    for name in models:
        set_model_state_dict(learner.models[name], state["models"][name])
    for name in optimizers:
        model = learner.models[learner.specs[name].model]
        set_optimizer_state_dict(model, learner.optimizers[name].adamw, state["optimizers"][name])
    manifest = read_manifest(path)
    learner.batches = manifest["batches"]
    learner.updates |= {name: manifest["updates"][name] for name in optimizers}
    learner.stepped |= {name: manifest["stepped"][name] for name in optimizers}


def _trained_models(learner: Learner) -> list[str]:
    return sorted({spec.model for spec in learner.specs.values()})


def _trained_state(learner: Learner, models: list[str], optimizers: list[str]) -> dict[str, Any]:
    """What a checkpoint holds of the models and optimizers named."""
    return {
        "models": {name: get_model_state_dict(learner.models[name]) for name in models},
        "optimizers": {
            name: get_optimizer_state_dict(learner.models[learner.specs[name].model], learner.optimizers[name].adamw)
            for name in optimizers
        },
    }
