"""`python -m pipelines.replay checkpoint=... buffer=... output=... [key=value ...]`: offline prefix replay.

Cuts prefixes from any replay buffer, continues each to its end with any checkpoint, judges, and asks that checkpoint's self-critic
at the prefix and after a chunk, with a reference solution and without. A Ray Data job of its own: every block ends as one Parquet
file of groups, and a job that is started again makes those that are missing.
"""

import json
import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from algorithms.ac2 import AC2
from algorithms.replay import Replay
from algorithms.self_critic import MAX_ANSWER_TOKENS, SelfCriticPrompt
from algorithms.types import PromptRow
from pipelines.command import cluster
from pipelines.command.entry import command
from pipelines.command.progress import table
from pipelines.config.make import ConfigError, check_bounds
from pipelines.config.run import RunConfig, build, digest, self_critic
from pipelines.data.prompts import load_tokenizer
from pipelines.engines.pool import EnginePool
from pipelines.engines.self_critic import SelfCritic
from pipelines.rollout.plan import plan_table
from pipelines.rollout.stages import generate, judge_rows
from pipelines.store import checkpoint
from pipelines.store.replay_buffer import ReplayBuffer, ReplayError, read_index, tokenizer_hash
from pipelines.store.whole_file import write_atomically
from serve import judge
from serve.reward_function import RewardFunction

FRACTIONS = (0.05, 0.95)  # AC2 Appendix A.4
SETTINGS = "replay.json"

# What is added to a judged group: the self-critic's answers, null where it gave no value. `probed`: continuations that had not
# ended after a chunk, whose value there is the self-critic's.
ASKED = [
    ("value", pa.float32()),
    ("value_with_reference", pa.float32()),
    ("probed", pa.list_(pa.bool_())),
    ("probe_value", pa.list_(pa.float32())),
    ("probe_value_with_reference", pa.list_(pa.float32())),
]


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

    def __post_init__(self) -> None:
        if self.cut not in ("fraction", "grid"):
            raise ConfigError(f"cut={self.cut}: use fraction or grid.")

    def cut_of(self, length: int, rng: np.random.Generator) -> int:
        """Where to cut a response of `length` tokens."""
        if self.cut == "fraction":
            return int(rng.uniform(*FRACTIONS) * length)
        return self.replay.cut(length, rng)


def run(tree: dict[str, Any]) -> Path:
    """Check, plan, roll out what is missing; the folder of groups."""
    own = {name: tree.pop(name) for name in ("buffer", "prefixes", "group_size", "cut", "chunk_tokens", "rows_per_file")}
    output = Path(tree.pop("output")).resolve()
    source = tree["checkpoint"]
    model = tree["model"] | {"path": checkpoint.model_folder(source)}
    config = build(tree | {"model": model, "checkpoint": {"every": 0, "keep_last": 1, "keep_best": 0}})
    url = own.pop("buffer")
    algorithm = config.algorithm
    if not isinstance(algorithm, AC2) or algorithm.replay is None:
        raise ConfigError(f"algorithm={algorithm.name}: offline replay cuts and asks as AC2 does; use algorithm=ac2 or a variant.")
    for name, value in own.items():
        check_bounds(ReplayJob, name, value, name)
    job = ReplayJob(
        **own,
        seed=config.seed,
        budget=config.task.max_new_tokens,
        replay=algorithm.replay,
        reference_reward=algorithm.reference_reward,
    )
    critic = self_critic(config)
    hash_ = tokenizer_hash(load_tokenizer(config.model.path))
    buffer = ReplayBuffer(url, sys.maxsize, hash_, read_index(url))
    rows = plan(job, buffer, bank_of(source), critic.prompt)
    parts = [rows.slice(start, job.rows_per_file) for start in range(0, rows.num_rows, job.rows_per_file)]
    missing = _missing(output, digest({**own, "seed": config.seed, "model": config.model.path, "buffer": url}), len(parts))
    print(
        table(
            [
                ("buffer", f"{url}: {len(buffer.trajectories())} trajectories" + "".join(f"; skipped {w}" for w in buffer.skipped)),
                ("prefixes", f"{rows.num_rows}, {rows.num_rows - rows['reference_ids'].null_count} with a reference"),
                ("files", f"{len(parts)}, {len(missing)} to make"),
            ]
        ),
        flush=True,
    )
    if missing:
        _roll_out(config, critic, job, [(i, parts[i]) for i in missing], output)
    print(table([("groups", str(output))]))
    return output


def plan(job: ReplayJob, buffer: ReplayBuffer, bank: dict[str, list[int]], prompt: SelfCriticPrompt) -> pa.Table:
    """One row for each of `prefixes` problems: its latest trajectory, cut. The order of problems is random and follows the seed."""
    rng = np.random.default_rng([job.seed, 0])
    latest = {trajectory.problem_id: trajectory for trajectory in buffer.trajectories()}
    if not latest:
        raise ReplayError(f"{buffer.url}: the buffer is empty; give one with trajectories.")
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


def bank_of(path: str) -> dict[str, list[int]]:
    """The reference bank in a checkpoint of AC2; empty for any other."""
    folders = [Path(path), *checkpoint.complete(path)[-1:]]
    saved = next((folder for folder in folders if (folder / checkpoint.MEMORY).is_file()), None)
    if saved is None:
        return {}
    from algorithms.ac2_memory import unpacked

    memory = checkpoint.read_coordinator_whole(saved)["memory"]
    if "bank" not in memory["values"]:
        return {}
    return {
        problem: ids.tolist() for problem, ids in zip(memory["values"]["bank"], unpacked("bank", memory["arrays"]), strict=True)
    }


def _missing(output: Path, fingerprint: str, parts: int) -> list[int]:
    """Which files are to be made; ConfigError if those that are there are of another job."""
    output.mkdir(parents=True, exist_ok=True)
    settings = output / SETTINGS
    if settings.is_file() and json.loads(settings.read_text())["fingerprint"] != fingerprint:
        raise ConfigError(f"output={output}: holds groups of another job (model, buffer or settings differ); give another folder.")
    write_atomically(settings, json.dumps({"fingerprint": fingerprint}))
    return [i for i in range(parts) if not file_of(output, i).is_file()]


def file_of(output: Path, part: int) -> Path:
    """The file of one part."""
    return output / f"groups-{part:05d}.parquet"


def _roll_out(config: RunConfig, critic: SelfCritic, job: ReplayJob, parts: list[tuple[int, pa.Table]], output: Path) -> None:
    cluster.connect(config.ray, config.judge.http_port)
    demand = cluster.demand(config)
    cluster.check_demand({name: part for name, part in demand.items() if "trainer" not in name and "coordinator" not in name})
    context = max(config.max_model_len, critic.context_limit + MAX_ANSWER_TOKENS)
    engines = EnginePool.start(config.model.path, config.model.dtype, context, config.engines, config.seed)
    judge.start(config.judge, RewardFunction.read(config.reward), output, config.task.reward_range, config.task.answer)
    engines.wait_ready()
    ids = [rows["row_id"][0].as_py() for _, rows in parts]
    names = dict(zip(ids, (str(file_of(output, i)) for i, _ in parts), strict=True))
    stage: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "num_cpus": 0.05}
    dataset = (
        ray.data.from_arrow([rows for _, rows in parts])
        .map_batches(partial(generate, engines=engines, sampling={"train": config.sampling}), **stage)
        .map_batches(partial(judge_rows, config=config.judge, send_ids=config.reward.signature == "trl"), **stage)
        .map_batches(partial(ask, engines=engines, critic=critic, job=job), **stage)
        .map_batches(partial(_write, names=names), **stage)
    )
    done = 0
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
        done += len(batch["row_id"])
        print(f"  {done}/{sum(rows.num_rows for _, rows in parts)} groups", flush=True)


def ask(groups: pa.Table, engines: EnginePool, critic: SelfCritic, job: ReplayJob) -> pa.Table:
    """Add the self-critic's answers at each group's prefix and at its continuations after a chunk, with a reference and without."""
    rows = groups.to_pylist()
    probed = [_probed(row, job) for row in rows]
    states: list[dict[str, Any]] = []
    for row, flags in zip(rows, probed, strict=True):
        ends = [[], *(ids[: job.chunk_tokens] for ids, flag in zip(row["response_ids"], flags, strict=True) if flag)]
        references = [None] if row["reference_ids"] is None else [None, row["reference_ids"]]
        states += [
            {"prompt_ids": row["prompt_ids"], "prefix_ids": [*row["prefix_ids"], *end], "reference_ids": reference}
            for reference in references
            for end in ends
        ]
    answers = iter(engines.values(states, critic))
    columns: dict[str, list[Any]] = {name: [] for name, _ in ASKED}
    for row, flags in zip(rows, probed, strict=True):
        columns["probed"].append(flags)
        for suffix in ("", "_with_reference"):
            known = not suffix or row["reference_ids"] is not None
            columns[f"value{suffix}"].append(next(answers) if known else None)
            columns[f"probe_value{suffix}"].append([next(answers) if flag and known else None for flag in flags])
    for name, kind in ASKED:
        groups = groups.append_column(name, pa.array(columns[name], kind))
    return groups


def _probed(row: dict[str, Any], job: ReplayJob) -> list[bool]:
    """Continuations that go on after a chunk: where AC2 would have stopped them and asked the self-critic."""
    left = job.budget - len(row["prefix_ids"])
    return [len(ids) > job.chunk_tokens and job.chunk_tokens < left for ids in row["response_ids"]]


def _write(groups: pa.Table, names: dict[int, str]) -> pa.Table:
    """Write a block as the file it was planned to be."""
    file = Path(names[pc.min(groups["row_id"]).as_py()])
    temporary = file.with_suffix(".tmp")
    pq.write_table(groups.sort_by("row_id"), temporary)
    os.replace(temporary, file)
    return groups.select(["row_id"])


if __name__ == "__main__":
    sys.exit(command("pipelines.replay", sys.argv[1:], __doc__ or "", "replay", run))
