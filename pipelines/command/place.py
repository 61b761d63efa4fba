"""Where a run goes, what it goes on from, and what it keeps of itself for those that go on with it."""

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.command import progress
from pipelines.command.resumed import differences
from pipelines.config.make import ConfigError
from pipelines.config.run import RunConfig, absolute_paths, digest
from pipelines.data.model_folder import read_model_config
from pipelines.data.problems import ProblemSet
from pipelines.store import checkpoint, run_folder


def place(config: RunConfig) -> tuple[str | None, str]:
    """The checkpoint to go on from, if any, and the run's folder."""
    if config.resume is not None:
        if config.branch_from is not None:
            raise ConfigError("give resume (go on with a run) or branch_from (begin another where it stood), not both.")
        return str(_before(config, _newest(config.resume, "resume"), "resume")), str(run_folder.of(config.resume))
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{config.algorithm.name}-{config.task.name}-{os.getpid()}"
    output_dir = str(Path(config.output_dir or Path("outputs") / name.replace("/", "_")).resolve())
    if checkpoint.complete(output_dir):
        raise ConfigError(
            f"output_dir={output_dir} already holds checkpoints: give resume={output_dir} to go on, or another folder."
        )
    if config.branch_from is None:
        return None, output_dir
    return str(_before(config, _newest(config.branch_from, "branch_from"), "branch_from")), output_dir


def _before(config: RunConfig, path: Path, key: str) -> Path:
    """A checkpoint from which there is something left to do."""
    step = checkpoint.read_manifest(path).get("step", 0)
    if step >= config.steps:
        raise ConfigError(f"{key}={path}: it stands at step {step}, and steps={config.steps}; raise steps.")
    return path


def _newest(path: str, key: str) -> Path:
    """The checkpoint that a path names: itself, or the newest of a run's folder."""
    if (Path(path) / checkpoint.MANIFEST).is_file():
        return Path(path).resolve()
    found = checkpoint.complete(path)
    if not found:
        raise ConfigError(f"{key}={path}: no complete checkpoint there.")
    return found[-1].resolve()


def keep_config(config: RunConfig, output_dir: str) -> str:
    """Keep the configuration with the run; what differs from the one that was there, in words, or from the one branched from."""
    kept = absolute_paths(config.composed) | {"resume": None, "output_dir": output_dir}
    changes = ""
    if (before := config.resume or config.branch_from) is not None:
        old = run_folder.read_config(run_folder.of(before))
        changed = [one for one in differences(old, kept) if one[0] != "output_dir"]
        changes = "; ".join(f"{key}: {was} -> {now}" for key, was, now in changed)
        if changed and config.branch_from is not None:
            print("differs from the run that it branches from:")
            print(progress.table([(key, f"{was} -> {now}") for key, was, now in changed]))
    run_folder.write_config(output_dir, kept)
    return changes


def manifest_of(config: RunConfig, train: ProblemSet) -> dict[str, Any]:
    """What a checkpoint must share with the run that loads it."""
    manifest = {
        "algorithm": config.algorithm.name,
        "model": _shape(config.model.path),
        "dataset": train.fingerprint,
        "seed": config.seed,
    }
    value = config.algorithm.value_model
    if value is None:
        return manifest
    return manifest | {"value_model": f"{_shape(value.path or config.model.path)} with {value.head.outputs} outputs"}


def _shape(path: str) -> str:
    """A fingerprint of what a model's weights look like."""
    incidental = ("transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
    return digest({key: value for key, value in read_model_config(path).items() if key not in incidental})
