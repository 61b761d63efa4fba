"""Files that are whole or absent, whenever the machine stops or the disk is full."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(file: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A stream whose content takes the file's place at the end, on the disk; until then, and after an error, all is as it was."""
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def write_atomically(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a text file that is either absent (or as it was) or whole."""
    with replacing(file, mode) as stream:
        stream.write(text.encode())


def sync_tree(path: Path) -> None:
    """Have the disk keep all files under a folder, and their names."""
    for folder, _, files in os.walk(path):
        for name in files:
            with open(Path(folder) / name, "rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(Path(folder))


def sync_folder(folder: Path) -> None:
    """Have the disk keep the names in a folder, so that a file that was renamed is not lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
