"""What every rank of the trainer does: one step after another, from planned rows to synced weights."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import ray.train
import torch
import torch.distributed as dist
from ray.data import DataIterator
from ray.train import Checkpoint
from ray.train.torch import get_device

from algorithms.types import Metrics, Recalled
from pipelines.engines.engine import restarts
from pipelines.store import checkpoint
from pipelines.trainer import state
from pipelines.trainer.batching import trainer_rows
from pipelines.trainer.collectives import collectively, on_rank_0
from pipelines.trainer.config import LoopConfig
from pipelines.trainer.learner import Learner
from pipelines.trainer.policy import NamedWeights
from pipelines.trainer.profile import profiled, write_step_timings
from pipelines.weights.ways import weight_sync


class Loop:
    """One rank's side of the run."""

    def __init__(self, config: LoopConfig, rollouts: DataIterator) -> None:
        torch.set_num_threads(config.learner.threads)
        self.config, self.algorithm, self.rollouts = config, config.algorithm, rollouts
        self.ask = config.coordinator.ask
        self.rank, self.current = dist.get_rank(), 0
        self.learner = Learner(
            config.model,
            config.optimizer,
            temperature=config.temperature,
            horizon=self.algorithm.max_new_tokens,
            max_tokens=config.learner.max_tokens_per_microbatch,
            device=get_device(),
            stream_timeout_s=config.learner.stream_timeout_s,
            reference_path=config.model.path if self.algorithm.needs_reference else None,
            value_model=self.algorithm.value_model,
            optimizers=self.algorithm.optimizers,
            credit_type=self.algorithm.credit_type,
            memory=self,
            offload_idle=config.learner.offload_idle,
        )
        on_rank_0(config.engines.wait_ready)  # they start while the ranks do
        named = NamedWeights(self.learner.policy, getattr(torch, config.model.dtype))
        self.weights = weight_sync(named, config.engines, config.weights_dir)
        self.version = 0
        restored = ray.train.get_checkpoint()
        resume_from = restored.path if restored is not None else config.resume_from
        if resume_from is not None:
            state.load(self.learner, resume_from)
            self.version = checkpoint.read_manifest(resume_from)["step"]
        if self.rank == 0:
            self.ask("rewind", resume_from)  # ranks that died may have gone further

    def run(self) -> None:
        """Steps from where the run stands to its end, with evaluations and checkpoints between them."""
        config, first = self.config, self.version
        self.sync(first)
        if config.evaluate_every and config.evaluate_at_start and first == 0:
            self.evaluate(0)
        for step in range(first + 1, config.steps + 1):
            self.step(step)
            last = step == config.steps
            if config.evaluate_every and (last or step % config.evaluate_every == 0):
                self.evaluate(step)
            stopping = self.stopping()
            if last or stopping or config.checkpoint.due(step):
                self.save(step)
            if stopping:
                return

    def stopping(self) -> bool:
        """Whether the run was told to end; the same on every rank."""
        told = [self.rank == 0 and bool(self.ask("stopping"))]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def step(self, step: int) -> None:
        """One step: roll out, learn, sync, report."""
        timings = self.learner.timings
        timings.clear()
        self.current, asked = step, self.self_critic_seconds()
        folder = Path(self.config.output_dir) / "profile"
        recorded = profiled(folder, step, self.rank) if step == self.config.profiled_step else nullcontext()
        with recorded, _timed(timings, "timing_s/step"):
            metrics = self.algorithm.update(self.learner, self.groups(step))
            with _timed(timings, "timing_s/update_weights"):
                self.sync(step)
        if self.rank == 0:
            if self.algorithm.self_critic_asked:
                metrics |= {"timing_s/self_critic": self.self_critic_seconds() - asked}
            metrics |= timings | {"engine/restarts": float(restarts(self.config.weights_dir))}
            logged = self.ask("finish_step", step, metrics)
            if step == self.config.profiled_step:
                write_step_timings(folder, step, logged)

    def self_critic_seconds(self) -> float:
        """Time the engines have spent on the self-critic's questions, where there are any."""
        asked = self.rank == 0 and self.algorithm.self_critic_asked
        return self.config.engines.self_critic_seconds() if asked else 0.0

    def recall(self) -> Recalled:
        """This rank's share of what the algorithm's memory has for the update of this step."""
        return self.ask("recall", self.current, self.rank, dist.get_world_size())

    def remember(self, values: Metrics) -> None:
        """Leave an update's values with the algorithm's memory."""
        if self.rank == 0:
            self.ask("remember", values)

    def groups(self, step: int) -> Iterator[dict[str, Any]]:
        """This rank's share of the step's groups as they finish, round after round until the algorithm needs no more."""
        for round_number in itertools.count():
            if not self.ask("plan", step, round_number, self.version):
                return
            yield from self.passed_rows()

    def passed_rows(self) -> Iterator[dict[str, Any]]:
        """One pass over the rollout dataset; begins when all ranks have asked for it."""
        whole_blocks = cast(int, None)  # as documented; the type says int alone
        for batch in self.rollouts.iter_batches(batch_size=whole_blocks, batch_format="pyarrow", prefetch_batches=0):
            yield from trainer_rows(batch, self.algorithm.credit_type)

    def sync(self, version: int) -> None:
        """Give the engines the weights."""
        self.learner.residency.use("policy")
        collectively(lambda: self.weights.push(version))
        self.version = version

    def evaluate(self, step: int) -> None:
        """One pass over the validation problems; its rows end at the coordinator."""
        self.ask("plan_evaluation", step, self.version)
        dist.barrier()
        for _ in self.passed_rows():
            pass
        dist.barrier()
        if self.rank == 0:
            self.ask("finish_evaluation", step)

    def save(self, step: int) -> None:
        """Checkpoint, tell Ray Train and the coordinator, and drop what is no longer kept."""
        start = time.perf_counter()
        config, path = self.config, checkpoint.folder(self.config.output_dir, step)
        coordinator = self.ask("state") if self.rank == 0 else {}
        manifest = config.manifest | {"step": step, "score": coordinator.get("evaluations", {}).get(str(step))}
        manifest["mlflow_run_id"] = coordinator.get("mlflow_run_id")
        self.learner.use_all()
        state.save(self.learner, path, coordinator, manifest)
        ray.train.report(
            {"step": step},
            checkpoint=Checkpoint.from_directory(str(path)) if self.rank == 0 else None,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )
        if self.rank == 0:
            checkpoint.prune(config.output_dir, config.checkpoint)
            self.ask("checkpointed", step, str(path), time.perf_counter() - start)


@contextmanager
def _timed(timings: Metrics, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[name] = time.perf_counter() - start
