"""Checkpoints: a folder is one only once its manifest is there, and the manifest is written last, atomically."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from pipelines.learner import Learner
from pipelines.model import full_state_dict

MANIFEST, COORDINATOR, MODEL, STATE = "manifest.json", "coordinator.json", "model", "state"
CARRIED = ("config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and which of them stay."""

    every: int  # steps; 0 for only the last
    keep_last: int
    keep_best: int  # by validation mean@n


class CheckpointError(ValueError):
    """A checkpoint that cannot be used here."""


def folder(output_dir: str, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(output_dir) / "checkpoints" / f"step_{step:06d}"


def complete(output_dir: str) -> list[Path]:
    """All checkpoints of a run that have their manifest, oldest first."""
    return sorted(file.parent for file in (Path(output_dir) / "checkpoints").glob(f"step_*/{MANIFEST}"))


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError if there is none."""
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path}: no {MANIFEST} there, so it is not a complete checkpoint.")
    return json.loads(file.read_text())


def read_coordinator(path: str | Path) -> dict[str, Any]:
    """The coordinator's state in a checkpoint."""
    return json.loads((Path(path) / COORDINATOR).read_text())


def save(learner: Learner, path: Path, model_path: str, coordinator: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Write model, optimizer and coordinator, then the manifest; collective. Rank 0 passes the coordinator's state."""
    model, optimizer = get_state_dict(learner.policy, learner.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(path / STATE))
    save_model_folder(learner, path / MODEL, model_path)
    if dist.get_rank() == 0:
        (path / COORDINATOR).write_text(json.dumps(coordinator, indent=1))
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


def load(learner: Learner, path: str | Path) -> None:
    """Restore weights, optimizer and update count, on any number of ranks; collective."""
    model, optimizer = get_state_dict(learner.policy, learner.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=str(Path(path) / STATE))
    set_state_dict(learner.policy, learner.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    learner.updates = read_manifest(path)["updates"]


def prune(output_dir: str, config: CheckpointConfig) -> list[Path]:
    """Delete all but the newest and the best checkpoints of a run; returns what was deleted."""
    paths = complete(output_dir)
    scores = {path: read_manifest(path).get("score") for path in paths}
    ranked = sorted((p for p in paths if scores[p] is not None), key=lambda p: scores[p], reverse=True)
    kept = set(paths[-config.keep_last :]) | set(ranked[: config.keep_best])
    dropped = [path for path in paths if path not in kept]
    for path in dropped:
        (path / MANIFEST).unlink()  # first: a half-deleted folder is no checkpoint
        shutil.rmtree(path)
    return dropped


def check_fits(path: str | Path, expected: dict[str, Any]) -> None:
    """CheckpointError if the checkpoint was made with another model, dataset or algorithm than this run has."""
    manifest = read_manifest(path)
    for name, value in expected.items():
        if manifest.get(name) != value:
            raise CheckpointError(f"{path}: made with {name} {manifest.get(name)!r}, but this run has {value!r}.")


def write_atomically(file: Path, text: str) -> None:
    """Write a file that is either absent (or as it was) or whole, whenever the machine stops."""
    temporary = file.with_suffix(".tmp")
    with open(temporary, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
