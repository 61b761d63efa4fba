"""The folder of groups that `pipelines.replay` makes: one Parquet file for each part, and what they are of."""

from pathlib import Path

SETTINGS = "replay.json"  # fingerprint of the job, its mode, the checkpoint and its step


def file_of(folder: Path, part: int) -> Path:
    """The file of one part."""
    return folder / f"groups-{part:05d}.parquet"


def files_of(folder: Path) -> list[Path]:
    """All files there are, in the order of their parts."""
    return sorted(folder.glob("groups-*.parquet"))
