"""What offline prefix replay asks about: prefixes cut from a buffer, or those that a run sampled after a checkpoint."""

import math
import sys
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from algorithms.ac2_memory import unpacked
from algorithms.replay import Replay
from algorithms.self_critic import SelfCriticPrompt
from algorithms.types import PromptRow
from pipelines.rollout.plan import plan_table
from pipelines.store import checkpoint
from pipelines.store.replay_buffer import ReplayBuffer, ReplayError, holds, read_index, same_place
from pipelines.store.rollouts import PROBED, rollouts_file

FRACTIONS = (0.05, 0.95)  # AC2 Appendix A.4


@dataclass(frozen=True)
class ReplayJob:
    """What to cut and how far to go."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "prefixes": (1, math.inf),
        "group_size": (1, 1 << 16),
        "chunk_tokens": (1, math.inf),
        "rows_per_file": (1, math.inf),
    }

    prefixes: int
    group_size: int
    cut: str
    chunk_tokens: int
    rows_per_file: int
    seed: int
    budget: int  # tokens of a response, prefix included
    replay: Replay  # the algorithm's; `cut=grid` cuts on its grid
    reference_reward: float  # a trajectory worth this much can serve as a reference

    def cut_of(self, length: int, rng: np.random.Generator) -> int:
        """Where to cut a response of `length` tokens."""
        if self.cut == "fraction":
            return int(rng.uniform(*FRACTIONS) * length)
        return self.replay.cut(length, rng)


@dataclass(frozen=True)
class Saved:
    """What the checkpoint of a run knows beside its model; of a plain model folder there is none."""

    step: int
    run: Path
    state: dict[str, Any]

    @classmethod
    def read(cls, source: str) -> "Saved | None":
        """The checkpoint in a folder, or the newest of the run there."""
        folders = [Path(source), *checkpoint.complete(source)[-1:]]
        folder = next((one for one in folders if (one / checkpoint.COORDINATOR).is_file()), None)
        if folder is None:
            return None
        state = checkpoint.read_coordinator_whole(folder)
        return cls(state["step"], folder.resolve().parent.parent, state)

    @property
    def bank(self) -> dict[str, list[int]]:
        """AC2's references; empty for any other algorithm."""
        memory = self.state["memory"]
        if memory is None or "bank" not in memory["values"]:
            return {}
        ids = unpacked("bank", memory["arrays"])
        return {problem: one.tolist() for problem, one in zip(memory["values"]["bank"], ids, strict=True)}

    @property
    def ready(self) -> set[str] | None:
        """Problems on which the critic is trusted; None where the algorithm knows no readiness."""
        memory = self.state["memory"]
        return set(memory["values"]["readiness"]["ready"]) if memory is not None and "readiness" in memory["values"] else None

    def buffer(self) -> str | None:
        """Where the run has its replay buffer; None if it replays nothing, or if no file of it is there."""
        view = self.state["replay"]
        places = [str(self.run / "replay"), self.state["replay_url"]]
        return next((url for url in places if holds(url, view)), None) if view is not None else None


def open_buffer(url: str | None, saved: Saved | None, tokenizer_hash: str) -> ReplayBuffer:
    """The buffer at a URL, or the checkpoint's own as the checkpoint saw it; ReplayError where there is none."""
    own = saved.buffer() if saved is not None else None
    if url is None and own is None:
        raise ReplayError("buffer=null: the checkpoint has no replay buffer of its own; give one.")
    place = url or own
    assert place is not None
    if saved is not None and own is not None and same_place(place, own):
        return ReplayBuffer(place, sys.maxsize, tokenizer_hash, saved.state["replay"])
    return ReplayBuffer(place, sys.maxsize, tokenizer_hash, read_index(place))


def plan(
    job: ReplayJob,
    buffer: ReplayBuffer,
    bank: dict[str, list[int]],
    prompt: SelfCriticPrompt,
    problems: Container[str] | None = None,
) -> pa.Table:
    """One row for each of `prefixes` problems: its latest trajectory, cut. The order of problems is random and follows the seed.

    `problems` are those that may be chosen; None takes any.
    """
    rng = np.random.default_rng([job.seed, 0])
    latest = {problem: one for problem, one in buffer.latest().items() if problems is None or problem in problems}
    if not latest:
        why = "the buffer is empty" if not buffer.latest() else "no trajectory of a ready problem is there (problems=all takes any)"
        raise ReplayError(f"{buffer.url}: {why}; give one with trajectories.")
    solutions = _solutions(buffer, job.reference_reward)
    rows = []
    for problem_id in rng.permutation(sorted(latest))[: job.prefixes].tolist():
        trajectory = latest[problem_id]
        prefix = buffer.prefix(trajectory, min(job.cut_of(trajectory.length, rng), job.budget - 1))
        # Never the trajectory that is cut: it would give the rest away.
        others = [sequence for sequence in solutions.get(problem_id, []) if sequence != trajectory.sequence]
        reference = bank.get(problem_id) or (prompt.solution(buffer.response(others[-1])).tolist() if others else None)
        problem = buffer.problem(trajectory)
        rows.append(PromptRow(problem, job.group_size, job.budget - len(prefix), prefix_ids=prefix, reference_ids=reference))
    return plan_table(rows, 0, 0, 0, job.seed)


def _solutions(buffer: ReplayBuffer, least: float) -> dict[str, list[int]]:
    """Sequence numbers of trajectories that can serve as references, by problem."""
    found: dict[str, list[int]] = {}
    for trajectory in buffer.trajectories():
        if trajectory.reward is not None and trajectory.reward >= least:
            found.setdefault(trajectory.problem_id, []).append(trajectory.sequence)
    return found


def sampled_after(saved: Saved) -> tuple[pa.Table, list[int]]:
    """Groups of the 20 steps after a checkpoint that were judged to their end and have a reference, and the steps that are there.

    The fourth panel of AC2's Figure 2 asks the checkpoint about their prefixes. ReplayError if there is none.
    """
    steps = range(saved.step + 1, saved.step + PROBED + 1)
    files = {step: file for step in steps if (file := rollouts_file(saved.run, step)).is_file()}
    kept, first = [], 0
    for file in files.values():
        table = pq.read_table(file)
        chosen = [
            row["purpose"] == "train"
            and row["reference_ids"] is not None
            and not any(row["self_scored"])
            and None not in row["reward"]
            for row in table.select(["purpose", "reference_ids", "self_scored", "reward"]).to_pylist()
        ]
        table = table.filter(pa.array(chosen, pa.bool_()))
        numbers = pa.array(range(first, first + table.num_rows), table.schema.field("row_id").type)  # unique over steps
        kept.append(table.set_column(table.schema.get_field_index("row_id"), table.schema.field("row_id"), numbers))
        first += table.num_rows
    if not first:
        raise ReplayError(
            f"{saved.run}/rollouts: no group of steps {steps[0]} to {steps[-1]} has a reference and rewards alone; keep "
            f"the rollouts after the checkpoint (checkpoint.keep_steps=[{saved.step}]) and let the run go on beyond it."
        )
    return pa.concat_tables(kept), list(files)
