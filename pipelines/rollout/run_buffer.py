"""The replay buffer of a run: opened where the run stands, filled step by step, pruned to what checkpoints need."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from algorithms.replay import Replay
from algorithms.types import StoredTrajectory
from pipelines.store import checkpoint
from pipelines.store.replay_buffer import ReplayBuffer, holds
from pipelines.store.trajectories import trajectories


@dataclass(frozen=True)
class BufferPlace:
    """Where a run keeps its trajectories, and what they must fit."""

    url: str
    start_from: str | None
    tokenizer_hash: str
    output_dir: str  # the run's, whose checkpoints pin files


class RunBuffer:
    """What the coordinator knows of its algorithm's replay buffer."""

    def __init__(self, replay: Replay, place: BufferPlace, view: dict[str, Any] | None, url: str | None) -> None:
        self._replay, self._place = replay, place
        self.buffer = self._open(view, url)

    def _open(self, view: dict[str, Any] | None, url: str | None) -> ReplayBuffer:
        """At the beginning, from another run's buffer, or as a checkpoint saw it; `url` is where the checkpoint's run had it."""
        place, capacity = self._place, self._replay.capacity
        if view is None and place.start_from is not None:
            return ReplayBuffer.copy_of(place.start_from, place.url, capacity, place.tokenizer_hash)
        if view is not None and url is not None and not holds(place.url, view):  # a branch of another run
            return ReplayBuffer.copy_of(url, place.url, capacity, place.tokenizer_hash, view)
        return ReplayBuffer(place.url, capacity, place.tokenizer_hash, view)

    def trajectories(self, known: Container[str]) -> list[StoredTrajectory]:
        """What it holds of known problems, oldest first."""
        return [one for one in self.buffer.trajectories() if one.problem_id in known]

    def fill(self, table: pa.Table, sampling: dict[str, Any]) -> None:
        """Take a step's refill rollouts, right or wrong unless the algorithm asks for a least reward."""
        refills = table.filter(pc.equal(table["purpose"], "refill"))
        if (least := self._replay.least_reward) is not None and refills.num_rows:
            first = pc.list_element(refills["reward"], 0)
            refills = refills.filter(pc.fill_null(pc.greater_equal(first, least), False))
        self.buffer.append(trajectories(refills, sampling))
        self.buffer.collect(self._pinned_files())

    def _pinned_files(self) -> set[str]:
        """Buffer files that a checkpoint may go back to."""
        states = [checkpoint.read_coordinator(path) for path in checkpoint.complete(self._place.output_dir)]
        views = [state["replay"] for state in states if state["replay"] is not None]
        return {name for view in views for name in [*view["files"], *view["latest"]]}

    def metrics(self, step: int, known: Container[str]) -> dict[str, float]:
        """How much it holds, and how old that is."""
        stored = self.buffer.trajectories()
        metrics = {"replay/size": float(len(stored)), "replay/skipped_files": float(len(self.buffer.skipped))}
        if stored:
            metrics["replay/age_steps/mean"] = float(np.mean([step - one.step for one in stored]))
            metrics["replay/problems"] = float(len({one.problem_id for one in stored}))
            metrics["replay/unknown_problems"] = float(sum(one.problem_id not in known for one in stored))
        return metrics
