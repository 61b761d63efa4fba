"""One step under torch's profiler: a trace per rank, and where the step's time went."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from algorithms.types import Metrics
from pipelines.store.whole_file import write_atomically

# Parts of a step that may overlap: the engines and the judge work while the ranks compute.
ROLLOUT = ("timing_s/gen", "timing_s/reward", "timing_s/self_critic")


@contextmanager
def profiled(folder: Path, step: int, rank: int) -> Iterator[None]:
    """Record this rank's step; `step_N_rank_R.json.gz` opens in Perfetto and in Chrome's tracing page."""
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        yield
    profile.export_chrome_trace(str(folder / f"step_{step:06d}_rank_{rank}.json.gz"))


def write_step_timings(folder: Path, step: int, metrics: Metrics) -> None:
    """Keep the timings of the profiled step beside its traces."""
    timings = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
    write_atomically(folder / f"step_{step:06d}.json", json.dumps(timings, indent=1))


def timings_table(folder: Path) -> list[tuple[str, str]]:
    """The parts of the profiled step with their seconds and shares, the longest first."""
    rows: list[tuple[str, str]] = []
    for file in sorted(folder.glob("step_*.json")):
        timings: Metrics = json.loads(file.read_text())
        whole = timings.pop("timing_s/step")
        rows.append((f"{file.stem.replace('_', ' ')} took", f"{whole:.2f} s"))
        for name, seconds in sorted(timings.items(), key=lambda item: -item[1]):
            beside = ", beside the ranks" if name in ROLLOUT else ""
            rows.append((f"  {name.removeprefix('timing_s/')}", f"{seconds:.2f} s ({seconds / whole:.0%}{beside})"))
    return rows
