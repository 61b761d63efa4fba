"""The groups of each step on disk, as Parquet in the schema of `pipelines/rollout/schema.py`."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.store.whole_file import replacing


def rollouts_file(output_dir: str | Path, step: int) -> Path:
    """Where the groups of a step lie."""
    return Path(output_dir) / "rollouts" / f"step_{step:06d}.parquet"


PROBED = 20  # steps after a named checkpoint whose prefixes it may be asked about (AC2 Figure 2, fourth panel)


def write_rollouts(output_dir: str, step: int, table: pa.Table, keep: int | None, after: Sequence[int] = ()) -> None:
    """Keep a step's groups, and only those of the newest `keep` steps and of the steps that follow one of `after`."""
    file = rollouts_file(output_dir, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        pq.write_table(table, stream)
    if keep is not None:
        for old in file.parent.glob("step_*.parquet"):
            number = int(old.stem.removeprefix("step_"))
            if number <= step - keep and not any(named < number <= named + PROBED for named in after):
                old.unlink()
