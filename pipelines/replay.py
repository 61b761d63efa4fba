"""`python -m pipelines.replay checkpoint=... output=... [buffer=... key=value ...]`: offline prefix replay.

Cuts prefixes from the checkpoint's or any other replay buffer, continues each to its end with the checkpoint, judges, and asks its
self-critic at the prefix and after a chunk, with a reference solution and without. `mode=probe` asks about the prefixes that the
run sampled after the checkpoint, and generates nothing. A Ray Data job of its own: every block ends as one Parquet file of groups,
and a job that is started again makes those that are missing.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from algorithms.ac2 import AC2
from algorithms.self_critic import MAX_ANSWER_TOKENS
from algorithms.types import Problem
from pipelines.command import cluster
from pipelines.command.entry import command
from pipelines.command.progress import table
from pipelines.command.scorable import scoring_of
from pipelines.config.make import ConfigError, check_bounds
from pipelines.config.run import RunConfig, build, digest, self_critic
from pipelines.data.prompts import load_tokenizer
from pipelines.engines.pool import EnginePool
from pipelines.engines.self_critic import SelfCritic
from pipelines.rollout.offline import ReplayJob, Saved, open_buffer, plan, sampled_after
from pipelines.rollout.stages import generate, judge_rows
from pipelines.store import checkpoint
from pipelines.store.groups import SETTINGS, file_of
from pipelines.store.replay_buffer import ReplayBuffer, tokenizer_hash
from pipelines.store.whole_file import write_atomically
from serve import judge
from serve.reward_function import RewardFunction
from serve.scoring import Scoring

# What is added to a judged group: the self-critic's answers, null where it gave no value. `probed`: continuations that had not
# ended after a chunk, whose value there is the self-critic's.
ASKED = [
    ("value", pa.float32()),
    ("value_with_reference", pa.float32()),
    ("probed", pa.list_(pa.bool_())),
    ("probe_value", pa.list_(pa.float32())),
    ("probe_value_with_reference", pa.list_(pa.float32())),
]


def run(tree: dict[str, Any]) -> Path:
    """Check, plan, make what is missing; the folder of groups."""
    own = {name: tree.pop(name) for name in ("prefixes", "group_size", "cut", "chunk_tokens", "rows_per_file")}
    output, url = Path(tree.pop("output")).resolve(), tree.pop("buffer")
    mode, problems = _choice(tree, "mode", ("continue", "probe")), _choice(tree, "problems", (None, "ready", "all"))
    _choice({"cut": own["cut"]}, "cut", ("fraction", "grid"))
    source = tree["checkpoint"]
    model = tree["model"] | {"path": checkpoint.model_folder(source)}
    config = build(tree | {"model": model, "checkpoint": {"every": 0, "keep_last": 1, "keep_best": 0}})
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
    critic, saved = self_critic(config), Saved.read(source)
    if mode == "probe":
        rows, shown = _sampled(source, saved)
    else:
        rows, shown = _cut(job, open_buffer(url, saved, tokenizer_hash(load_tokenizer(config.model.path))), saved, problems, critic)
    parts = [rows.slice(start, job.rows_per_file) for start in range(0, rows.num_rows, job.rows_per_file)]
    named = {**own, "mode": mode, "problems": problems, "seed": config.seed, "model": config.model.path}
    planned = zip(rows["problem_id"].to_pylist(), map(len, rows["prefix_ids"].to_pylist()), strict=True)
    about = {"mode": mode, "checkpoint": source, "step": saved.step if saved is not None else 0}
    missing = _missing(output, about | {"fingerprint": digest(named | {"planned": list(planned)})}, len(parts))
    print(table([*shown, ("files", f"{len(parts)}, {len(missing)} to make")]), flush=True)
    if missing:
        _make(mode, config, critic, job, [(i, parts[i]) for i in missing], output)
    print(table([("groups", str(output))]))
    return output


def _choice(tree: dict[str, Any], name: str, choices: tuple[str | None, ...]) -> Any:
    value = tree.pop(name)
    if value not in choices:
        raise ConfigError(f"{name}={value}: use {' or '.join('null' if choice is None else choice for choice in choices)}.")
    return value


def _sampled(source: str, saved: Saved | None) -> tuple[pa.Table, list[tuple[str, str]]]:
    """The groups that a checkpoint is probed with, and what is shown of them."""
    if saved is None:
        raise ConfigError(
            f"checkpoint={source}: mode=probe asks about what a run sampled after a checkpoint; give a checkpoint of a run."
        )
    rows, steps = sampled_after(saved)
    return rows, [("prefixes", f"{rows.num_rows} with a reference and rewards alone, of steps {steps[0]} to {steps[-1]}")]


def _cut(
    job: ReplayJob, buffer: ReplayBuffer, saved: Saved | None, problems: str | None, critic: SelfCritic
) -> tuple[pa.Table, list[tuple[str, str]]]:
    """Prefixes cut from a buffer, and what is shown of them."""
    ready = saved.ready if saved is not None else None
    if problems == "ready" and ready is None:
        raise ConfigError("problems=ready: the checkpoint knows no readiness; only AC2's do.")
    chosen = None if problems == "all" else ready
    rows = plan(job, buffer, saved.bank if saved is not None else {}, critic.prompt, chosen)
    kind = "" if chosen is None else f" of {sum(problem in chosen for problem in buffer.latest())} ready problems"
    return rows, [
        (
            "buffer",
            f"{buffer.url}: {len(buffer.trajectories())} trajectories, {len(buffer.latest())} problems"
            + "".join(f"; skipped {why}" for why in buffer.skipped),
        ),
        ("prefixes", f"{rows.num_rows}{kind}, {rows.num_rows - rows['reference_ids'].null_count} with a reference"),
    ]


def _missing(output: Path, about: dict[str, Any], parts: int) -> list[int]:
    """Which files are to be made; ConfigError if those that are there are of another job."""
    output.mkdir(parents=True, exist_ok=True)
    settings = output / SETTINGS
    if settings.is_file() and json.loads(settings.read_text())["fingerprint"] != about["fingerprint"]:
        raise ConfigError(f"output={output}: holds groups of another job (model, buffer or settings differ); give another folder.")
    write_atomically(settings, json.dumps(about))
    return [i for i in range(parts) if not file_of(output, i).is_file()]


def _make(
    mode: str, config: RunConfig, critic: SelfCritic, job: ReplayJob, parts: list[tuple[int, pa.Table]], output: Path
) -> None:
    """Have the engines and, unless prefixes are only probed, the judge make the groups of these parts."""
    probing = mode == "probe"
    scoring = Scoring() if probing else scoring_of(config, RewardFunction.read(config.reward), _problems(parts), [])
    cluster.connect(config.ray, config.judge.http_port)
    unused = ("trainer", "coordinator", *(["judge"] if probing else []))
    demand = cluster.demand(config)
    cluster.check_demand({name: part for name, part in demand.items() if not any(word in name for word in unused)})
    context = max(config.max_model_len, critic.context_limit + MAX_ANSWER_TOKENS)
    engines = EnginePool.start(config.model.path, config.model.dtype, context, config.engines, config.seed)
    if not probing:
        judge.start(config.judge, scoring, output)
    engines.wait_ready()
    ids = [rows["row_id"][0].as_py() for _, rows in parts]
    names = dict(zip(ids, (str(file_of(output, i)) for i, _ in parts), strict=True))
    stage: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "num_cpus": 0.05}
    dataset: ray.data.Dataset = ray.data.from_arrow([rows for _, rows in parts])
    if not probing:
        dataset = dataset.map_batches(partial(generate, engines=engines, sampling={"train": config.sampling}), **stage)
        dataset = dataset.map_batches(partial(judge_rows, config=config.judge, send_ids=config.reward.signature == "trl"), **stage)
    asked = partial(ask, engines=engines, critic=critic, job=None if probing else job, model_path=config.model.path)
    dataset = dataset.map_batches(asked, **stage).map_batches(partial(_write, names=names), **stage)
    done = 0
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
        done += len(batch["row_id"])
        print(f"  {done}/{sum(rows.num_rows for _, rows in parts)} groups", flush=True)


def _problems(parts: list[tuple[int, pa.Table]]) -> list[Problem]:
    """The problems of planned rows, for what asks whether they can be scored."""
    columns = ("problem_id", "data_source", "ground_truth", "extra_info")
    rows = pa.concat_tables(part.select(columns) for _, part in parts).to_pylist()
    return [Problem(row["problem_id"], row["data_source"], [], row["ground_truth"], row["extra_info"]) for row in rows]


def ask(groups: pa.Table, engines: EnginePool, critic: SelfCritic, job: ReplayJob | None, model_path: str) -> pa.Table:
    """Add the self-critic's answers at each group's prefix and at its continuations after a chunk, with a reference and without.

    Without a job it is asked at prefixes alone.
    """
    rows = groups.to_pylist()
    tokenizer = load_tokenizer(model_path) if job is not None and critic.complete_answer is not None else None
    probed = [_probed(row, critic, job, tokenizer) for row in rows]
    states: list[dict[str, Any]] = []
    for row, flags in zip(rows, probed, strict=True):
        chunk = job.chunk_tokens if job is not None else 0
        ends = [[], *(ids[:chunk] for ids, flag in zip(row["response_ids"], flags, strict=True) if flag)]
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


def _probed(row: dict[str, Any], critic: SelfCritic, job: ReplayJob | None, tokenizer: Any) -> list[bool]:
    """Continuations that go on after a chunk, without a complete answer: where AC2 would have stopped and asked the self-critic."""
    if job is None:
        return [False] * len(row["response_ids"])
    left = job.budget - len(row["prefix_ids"])
    flags = [len(ids) > job.chunk_tokens and job.chunk_tokens < left for ids in row["response_ids"]]
    if tokenizer is None:
        return flags
    ends = [[*row["prefix_ids"], *ids[: job.chunk_tokens]] for ids in row["response_ids"]]
    texts = tokenizer.batch_decode(ends, skip_special_tokens=True)
    return [flag and not critic.answered(text) for flag, text in zip(flags, texts, strict=True)]


def _write(groups: pa.Table, names: dict[int, str]) -> pa.Table:
    """Write a block as the file it was planned to be."""
    file = Path(names[pc.min(groups["row_id"]).as_py()])
    temporary = file.with_suffix(".tmp")
    pq.write_table(groups.sort_by("row_id"), temporary)
    os.replace(temporary, file)
    return groups.select(["row_id"])


if __name__ == "__main__":
    sys.exit(command("pipelines.replay", sys.argv[1:], __doc__ or "", "replay", run))
