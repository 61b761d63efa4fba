"""What a replay buffer says of itself: its index, checked before it is believed, and the run that writes to it."""

import json
import re
from typing import Any

import fsspec

from pipelines.store.trajectories import ReplayError

INDEX, OWNER = "index.json", "owner.json"
FILE = re.compile(r"trajectories-(\d{12})\.parquet")
_KEYS = {"tokenizer_hash": str, "files": list, "latest": list, "oldest": int, "next": int}


def read_index(url: str) -> dict[str, Any]:
    """The index of the buffer at a URL; ReplayError if there is none or it is no index."""
    fs, root = fsspec.core.url_to_fs(url)
    try:
        with fs.open(f"{root}/{INDEX}") as stream:
            return check_index(f"{url}/{INDEX}", json.load(stream))
    except FileNotFoundError:
        raise ReplayError(f"{url}: no replay buffer there ({INDEX} is missing).") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ReplayError):
            raise
        raise ReplayError(f"{url}/{INDEX}: cannot be read as JSON ({str(error).splitlines()[0]}).") from None


def check_index(where: str, index: Any) -> dict[str, Any]:
    """The index; ReplayError if a part is missing, of another type, or names a file outside the buffer."""
    if not isinstance(index, dict):
        raise ReplayError(f"{where}: holds no index of a replay buffer.")
    for name, kind in _KEYS.items():
        if not isinstance(index.get(name), kind) or isinstance(index.get(name), bool):
            raise ReplayError(f"{where}: {name} is missing or no {kind.__name__}.")
    names = [*index["latest"], *index["files"]]
    for name in names:
        if not isinstance(name, str) or FILE.fullmatch(name) is None:
            raise ReplayError(f"{where}: names the file {name!r}, which is none of a replay buffer's.")
    if len(set(names)) != len(names):
        raise ReplayError(f"{where}: names a file twice.")
    return index


def first_sequence(name: str) -> int:
    """The number of the first trajectory in a file."""
    match = FILE.fullmatch(name)
    assert match is not None
    return int(match[1])


def check_owner(url: str, run: str) -> None:
    """ReplayError if the buffer at a URL is another run's. A run may read what another writes (`start_from`)."""
    fs, root = fsspec.core.url_to_fs(url)
    if not fs.exists(f"{root}/{OWNER}"):
        return
    with fs.open(f"{root}/{OWNER}") as stream:
        try:
            owner = json.load(stream)["run"]
        except (ValueError, KeyError, TypeError):
            raise ReplayError(f"{url}/{OWNER}: cannot be read; remove it if no run writes to this buffer.") from None
    if owner != run:
        raise ReplayError(
            f"replay_buffer.url={url}: the run in {owner} writes there; begin with what it holds by "
            f"replay_buffer.start_from={url}, or give another url (if that run has moved, remove {OWNER})."
        )


def claim(url: str, run: str) -> None:
    """Make the buffer at a URL a run's own; ReplayError if it is another's."""
    check_owner(url, run)
    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(root, exist_ok=True)
    with fs.open(f"{root}/{OWNER}", "w") as stream:
        json.dump({"run": run}, stream)
