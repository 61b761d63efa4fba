"""`python -m pipelines.sft data.files=[...] output_dir=... [model=...] [key=value ...]`: fine-tune on responses and values."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import numpy as np
import ray

from algorithms.self_critic import round_to_grid
from algorithms.types import Sample
from pipelines.command import cluster
from pipelines.command.entry import command
from pipelines.config.make import make
from pipelines.config.run import RayConfig, digest, resolve_model, resolve_tracking
from pipelines.data.files import DataError, read_rows
from pipelines.data.messages import PromptError, as_tools
from pipelines.data.prompts import load_tokenizer, render_prompt, stop_ids
from pipelines.engines.self_critic_prompt import load_self_critic_prompt
from pipelines.store.tracker import Tracker, TrackingConfig, description, git_sha
from pipelines.trainer.config import LearnerConfig, ModelConfig, OptimizerConfig, read_model_config

LOG_EVERY = 20  # optimizer steps


@dataclass(frozen=True)
class SFTConfig:
    """What every rank needs."""

    model: ModelConfig
    optimizer: OptimizerConfig
    learner: LearnerConfig
    sequences: ray.ObjectRef  # list of (ids, prompt length)
    seed: int
    epochs: int
    batch_size: int
    shuffle: bool
    loss_aggregation: str
    output_dir: str


def load_examples(
    files: list[str], model: ModelConfig, max_tokens: int, template_arguments: dict[str, Any] | None = None
) -> tuple[list[tuple[np.ndarray, int]], int]:
    """Token ids and prompt lengths of all examples, and how many were too long.

    A row with a `value` teaches the critic: `response` is part of one, its value is asked for with `reference` if there is one. Any
    other row teaches the response, ended by a stop token.
    """
    tokenizer, critic = load_tokenizer(model.path), None
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else stop_ids(model.path, tokenizer)[0]
    examples, dropped = [], 0

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for file in files:
        for i, row in enumerate(read_rows(file)):
            for column, kinds in (("prompt", (str, list)), ("response", (str,))):
                if not isinstance(row.get(column), kinds):
                    raise DataError(
                        f"{file}, row {i}: column {column!r} is missing or not {' or '.join(k.__name__ for k in kinds)}."
                    )
            try:
                context = render_prompt(tokenizer, row["prompt"], as_tools(row.get("tools")), template_arguments)
            except PromptError as error:
                raise DataError(f"{file}, row {i}, column 'prompt': {error}.") from error
            response = ids_of(row["response"])
            answer: Iterable[int] = [*response, end]
            if (value := row.get("value")) is not None:
                if not 0 <= value <= 1:
                    raise DataError(f"{file}, row {i}: a value of {value} is not between 0 and 1.")
                critic = critic or load_self_critic_prompt(model.self_critic_prompt, model.path, template_arguments)
                reference = row.get("reference")
                context = critic.query(context, response, ids_of(reference) if reference is not None else None).tolist()
                answer = critic.answer(round_to_grid(value))
            ids = np.array([*context, *answer], dtype=np.int32)
            if len(ids) > max_tokens:
                dropped += 1
            else:
                examples.append((ids, len(context)))
    return examples, dropped


def run_rank(config: SFTConfig) -> None:
    """One rank: its share of every batch, an optimizer step each, and the model folder at the end."""
    import torch
    import torch.distributed as dist
    from ray.train.torch import get_device

    from algorithms.policy_update import actor_metrics
    from algorithms.sft import nll_loss
    from pipelines.trainer.learner import Learner
    from pipelines.trainer.state import save_model_folder

    torch.set_num_threads(config.learner.threads)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    examples = ray.get(config.sequences, timeout=600)
    learner = Learner(
        config.model,
        config.optimizer,
        temperature=1.0,
        horizon=1,
        max_tokens=config.learner.max_tokens_per_microbatch,
        device=get_device(),
    )
    log = Path(config.output_dir) / "progress.jsonl"
    for epoch in range(config.epochs):
        order = np.arange(len(examples))
        if config.shuffle:
            np.random.default_rng([config.seed, epoch]).shuffle(order)
        for start in range(0, len(order), config.batch_size):
            batch = [_sample(int(i), *examples[i]) for i in order[start : start + config.batch_size][rank::ranks]]
            step = learner.step("actor", batch, nll_loss, aggregation=config.loss_aggregation)
            last, updates = start + config.batch_size >= len(order), learner.updates["actor"]
            if rank == 0 and (updates % LOG_EVERY == 0 or last):
                with open(log, "a") as stream:
                    print(json.dumps({"step": updates, **actor_metrics(step)}), file=stream)
    save_model_folder(learner, Path(config.output_dir))


def _sample(index: int, ids: np.ndarray, prompt_length: int) -> Sample:
    return Sample(index, ids.astype(np.int64), prompt_length, np.zeros(len(ids) - prompt_length, np.float32), advantage=0.0)


def run(tree: dict[str, Any]) -> None:
    """Check, load, fine-tune; the progress file is followed to the screen and to MLflow."""
    from ray.train import RunConfig
    from ray.train.torch import TorchTrainer

    from pipelines.trainer.launch import rank_options

    model = make(ModelConfig, resolve_model(tree["model"]), "model")
    read_model_config(model.path)
    learner = make(LearnerConfig, tree["cluster"]["learner"], "cluster.learner")
    examples, dropped = load_examples(tree["data"]["files"], model, tree["data"]["max_tokens"], tree["data"]["template_arguments"])
    if not examples:
        raise DataError(f"data.files: no usable example ({dropped} longer than {tree['data']['max_tokens']} tokens).")
    updates = tree["epochs"] * -(-len(examples) // tree["batch_size"])
    print(f"  {len(examples)} examples ({dropped} too long), {updates} updates of {tree['batch_size']}", flush=True)
    output = Path(tree["output_dir"]).resolve()
    output.mkdir(parents=True, exist_ok=True)
    for name in ("progress.jsonl", "mlflow.jsonl", "mlflow.sent", "mlflow.run"):  # left by an earlier fine-tuning
        (output / name).unlink(missing_ok=True)
    cluster.connect(make(RayConfig, tree["cluster"]["ray"], "cluster.ray"))
    cluster.check_demand({f"{learner.ranks} trainer ranks": (learner.ranks * learner.num_cpus, learner.ranks * learner.num_gpus)})
    config = SFTConfig(
        model=model,
        optimizer=make(OptimizerConfig, tree["optimizer"] | {"total_updates": updates}, "optimizer"),
        learner=learner,
        sequences=ray.put(examples),
        output_dir=str(output),
        **{name: tree[name] for name in ("seed", "epochs", "batch_size", "shuffle", "loss_aggregation")},
    )
    trainer = TorchTrainer(
        cast(Any, run_rank),
        train_loop_config=cast(Any, config),
        **rank_options(learner),
        run_config=RunConfig(name="ray_train", storage_path=str(output / "ray")),
    )
    tags = description("pipelines.sft", sys.argv[1:])
    tags |= {"algorithm": "sft", "git_sha": git_sha(), "config_digest": digest(tree)}
    tracker = Tracker(make(TrackingConfig, resolve_tracking(tree["tracking"]), "tracking"), tree, tags, output)
    with _Follow(output / "progress.jsonl", tracker, updates):
        trainer.fit()
    tracker.tag("checkpoint", str(output))
    if unsent := tracker.finish("FINISHED"):
        print(f"warning: {unsent}", file=sys.stderr)
    print(f"  model written to {output}")


class _Follow:
    """Shows each line of the progress file as it is written."""

    def __init__(self, file: Path, tracker: Tracker, updates: int) -> None:
        self._file, self._tracker, self._updates = file, tracker, updates
        self._stop, self._seen, self._began = threading.Event(), 0, time.perf_counter()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self._show()
        self._show()

    def _show(self) -> None:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        for line in lines[self._seen :]:
            metrics = json.loads(line)
            step = metrics.pop("step")
            self._tracker.metrics(metrics, step)
            seconds = time.perf_counter() - self._began
            print(f"update {step}/{self._updates}  loss {metrics['train/loss']:.4f}  {seconds:.0f} s", flush=True)
        self._seen = len(lines)


if __name__ == "__main__":
    sys.exit(command("pipelines.sft", sys.argv[1:], __doc__ or "", "sft", run))
