"""Checkpoints: a folder is one only once its manifest is there, and the manifest is written last, atomically."""

import json
import math
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

FOLDER, MANIFEST, COORDINATOR, MEMORY = "checkpoints", "manifest.json", "coordinator.json", "memory.npz"
STATE_KEYS = {"step", "cursor", "totals", "evaluations", "replay", "memory"}


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and which of them stay; `conf/config.yaml` says what each key is."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "every": (0, math.inf),
        "keep_last": (1, math.inf),
        "keep_best": (0, math.inf),
        "keep_steps": (1, math.inf),
    }

    every: int
    keep_last: int
    keep_best: int
    keep_steps: tuple[int, ...] = ()

    def due(self, step: int) -> bool:
        """Whether a step's end is one to write a checkpoint at, the run's last apart."""
        return step in self.keep_steps or bool(self.every and step % self.every == 0)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used here."""


def folder(output_dir: str, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(output_dir) / FOLDER / f"step_{step:06d}"


def complete(output_dir: str) -> list[Path]:
    """All checkpoints of a run that have their manifest, oldest first."""
    return sorted(file.parent for file in (Path(output_dir) / FOLDER).glob(f"step_*/{MANIFEST}"))


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError if there is none."""
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path}: no {MANIFEST} there, so it is not a complete checkpoint.")
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """A mapping from a run's file; CheckpointError if it is cut short or something else."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({str(error).splitlines()[0]}).") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: holds no mapping, so it is not this run's.")
    return found


def model_folder(path: str) -> str:
    """The Hugging Face folder of a checkpoint, of a run's newest checkpoint, or of a plain model folder."""
    found = complete(path)
    for candidate in (Path(path) / "model", *(p / "model" for p in found[-1:]), Path(path)):
        if (candidate / "config.json").is_file():
            return str(candidate.resolve())
    raise CheckpointError(f"checkpoint={path}: neither a run's folder, nor a checkpoint, nor a model folder.")


def write_coordinator(path: str | Path, state: dict[str, Any]) -> None:
    """Write the coordinator's state; the arrays of an algorithm's memory in a file of their own."""
    memory = state.get("memory")
    if memory is not None:
        np.savez(Path(path) / MEMORY, **memory["arrays"])
        state = state | {"memory": {"values": memory["values"]}}
    (Path(path) / COORDINATOR).write_text(json.dumps(state, indent=1))


def read_coordinator(path: str | Path) -> dict[str, Any]:
    """The coordinator's state in a checkpoint, without the arrays of an algorithm's memory."""
    state = read_json(Path(path) / COORDINATOR)
    if missing := sorted(STATE_KEYS - set(state)):
        raise CheckpointError(f"{Path(path) / COORDINATOR}: {missing[0]} is missing, so it is no state of a run.")
    return state


def read_coordinator_whole(path: str | Path) -> dict[str, Any]:
    """The coordinator's state in a checkpoint, whole."""
    state = read_coordinator(path)
    if state.get("memory") is not None:
        try:
            with np.load(Path(path) / MEMORY) as arrays:
                state["memory"]["arrays"] = dict(arrays)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{Path(path) / MEMORY}: cannot be read ({str(error).splitlines()[0]}).") from None
    return state


def prune(output_dir: str, config: CheckpointConfig) -> list[Path]:
    """Delete all but the newest and the best checkpoints of a run, and those named to stay; returns what was deleted."""
    paths = complete(output_dir)
    scores: dict[Path, Any] = {path: read_manifest(path).get("score") for path in paths}
    scored = [path for path in paths if scores[path] is not None and math.isfinite(scores[path])]
    ranked = sorted(scored, key=lambda path: float(scores[path]), reverse=True)
    named = {folder(output_dir, step) for step in config.keep_steps}
    kept = set(paths[-config.keep_last :]) | set(ranked[: config.keep_best]) | named
    dropped = [path for path in paths if path not in kept]
    for path in dropped:
        (path / MANIFEST).unlink()  # first: a half-deleted folder is no checkpoint
        shutil.rmtree(path)
    return dropped


def set_aside_later(output_dir: str, path: str | None) -> list[Path]:
    """Move a run's checkpoints after this one to `superseded/`: nothing may go on from a future that is being made anew."""
    later = [one for one in complete(output_dir) if path is not None and one.name > Path(path).name]
    for one in later:
        home = Path(output_dir) / "superseded"
        home.mkdir(exist_ok=True)
        shutil.rmtree(home / one.name, ignore_errors=True)
        one.rename(home / one.name)
    return later


def check_fits(path: str | Path, expected: dict[str, Any]) -> None:
    """CheckpointError if the checkpoint was made with another model, dataset or algorithm than this run has."""
    manifest = read_manifest(path)
    for name, value in expected.items():
        if manifest.get(name) != value:
            raise CheckpointError(f"{path}: made with {name} {manifest.get(name)!r}, but this run has {value!r}.")
