"""What a run's folder says of the run: who works in it, and with which configuration it was started."""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from pipelines.store.checkpoint import MANIFEST, CheckpointError, read_json
from pipelines.store.whole_file import write_atomically

CONFIG, LOCK, FAILURE = "config.json", "run.lock", "failure.txt"


def lock(folder: str | Path) -> IO[str]:
    """Take a run's folder for this process, until it ends or closes what this returns; CheckpointError if another has it.

    The kernel lets go of a dead process's lock, so nothing is left to clean up.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    stream = open(Path(folder) / LOCK, "a+")  # noqa: SIM115 (it stays open)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.seek(0)
        owner = stream.read().strip() or "another process"
        stream.close()
        raise CheckpointError(f"output_dir={folder}: in use by {owner}; wait for it, or give another folder.") from None
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    stream.flush()
    return stream


def of(path: str) -> Path:
    """The run's folder that `resume` means: itself, or that of one of its checkpoints."""
    folder = Path(path).resolve()
    return folder.parents[1] if (folder / MANIFEST).is_file() else folder


def write_config(folder: str | Path, tree: dict[str, Any]) -> None:
    """Keep the whole configuration with the run; it may hold a password of MLflow's server."""
    write_atomically(Path(folder) / CONFIG, json.dumps(tree, indent=1), mode=0o600)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The configuration that a run was started with; CheckpointError if it is not there or cannot be read."""
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG} there, so it is no run's folder.")
    return read_json(file)


def keep_failure(folder: str | Path, trace: str) -> Path:
    """Keep where the error was raised that ended the run; returns the file. A full disk keeps nothing, and may be the reason."""
    file = Path(folder) / FAILURE
    with contextlib.suppress(OSError):
        write_atomically(file, trace)
    return file
