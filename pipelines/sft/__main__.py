"""`python -m pipelines.sft data.files=[...] output_dir=... [model=...] [key=value ...]`: fine-tune on responses and values."""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import numpy as np
import ray

from algorithms.types import Sample
from pipelines.command import cluster
from pipelines.command.entry import command
from pipelines.config.make import ConfigError, make
from pipelines.config.run import RayConfig, digest, resolve_model, resolve_tracking
from pipelines.data.model_folder import read_model_config
from pipelines.sft.examples import ExamplesConfig, load_examples
from pipelines.store.tracker import Tracker, TrackingConfig, description, git_sha
from pipelines.trainer.config import LearnerConfig, ModelConfig, OptimizerConfig

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
    data = make(ExamplesConfig, tree["data"], "data")
    _check_room(data, learner)
    examples = load_examples(data, model.path, model.self_critic_prompt)
    updates = tree["epochs"] * -(-len(examples.used) // tree["batch_size"])
    print(f"  {examples.summary()}; {updates} updates of {tree['batch_size']}", flush=True)
    output = Path(tree["output_dir"]).resolve()
    output.mkdir(parents=True, exist_ok=True)
    for name in ("progress.jsonl", "mlflow.jsonl", "mlflow.sent", "mlflow.run"):  # left by an earlier fine-tuning
        (output / name).unlink(missing_ok=True)
    cluster.connect(make(RayConfig, tree["cluster"]["ray"], "cluster.ray"))
    cluster.check_demand({f"{learner.ranks} trainer ranks": (learner.ranks * learner.num_cpus, learner.ranks * learner.num_gpus)})
    config = SFTConfig(
        model=model,
        optimizer=make(OptimizerConfig, tree["optimizer"] | {"total_updates": updates, "warmup_by": "optimizer_step"}, "optimizer"),
        learner=learner,
        sequences=ray.put(examples.used),
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
    tags |= {"algorithm": "sft", "git_sha": git_sha(), "config_digest": digest(tree), "examples": examples.summary()}
    tracker = Tracker(make(TrackingConfig, resolve_tracking(tree["tracking"]), "tracking"), tree, tags, output)
    with _Follow(output / "progress.jsonl", tracker, updates):
        trainer.fit()
    tracker.tag("checkpoint", str(output))
    if unsent := tracker.finish("FINISHED"):
        print(f"warning: {unsent}", file=sys.stderr)
    print(f"  model written to {output}")


def _check_room(data: ExamplesConfig, learner: LearnerConfig) -> None:
    """ConfigError if an example may be longer than what a rank takes at once."""
    longest = data.max_prompt_tokens + data.max_response_tokens
    if longest > learner.max_tokens_per_microbatch:
        raise ConfigError(
            f"cluster.learner.max_tokens_per_microbatch={learner.max_tokens_per_microbatch} cannot hold one example of {longest} "
            "tokens (data.max_prompt_tokens and data.max_response_tokens): raise it."
        )


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
