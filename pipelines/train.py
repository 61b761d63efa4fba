"""`python -m pipelines.train [algorithm=...] [task=...] [model=...] [cluster=...] [experiment=...] [key=value ...]`"""

import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray
from ray.train import DataConfig as TrainDataConfig
from ray.train import FailureConfig
from ray.train import RunConfig as TrainRunConfig
from ray.train.torch import TorchTrainer

from algorithms.flops import DecodingCost
from pipelines.command import cluster, progress, signals
from pipelines.command.entry import command
from pipelines.command.place import keep_config, manifest_of, place
from pipelines.command.resumed import compose_run
from pipelines.command.scorable import scoring_of
from pipelines.config.run import RunConfig, build, digest, self_critic_of
from pipelines.data.model_folder import read_model_config
from pipelines.data.problems import ProblemSet, load_problems, reading_notes
from pipelines.data.prompts import load_tokenizer, stop_ids
from pipelines.engines.config import Sampling
from pipelines.engines.pool import EnginePool
from pipelines.engines.self_critic import SelfCritic
from pipelines.rollout.coordinator import Coordinator, CoordinatorConfig
from pipelines.rollout.dataset import rollout_dataset
from pipelines.store import checkpoint, run_folder
from pipelines.store.buffer_index import claim
from pipelines.store.outbox import masked
from pipelines.store.replay_buffer import check_place, tokenizer_hash
from pipelines.store.tracker import FLUSH_TIMEOUT_S, description, git_sha
from pipelines.trainer.config import LoopConfig
from pipelines.trainer.launch import rank_options, run_rank
from pipelines.trainer.link import CoordinatorDied, CoordinatorLink
from serve import judge
from serve.reward_function import RewardFunction

PROFILED_STEP = 2  # the first pays for starts


class UnequalSplit(TrainDataConfig):
    """Gives ranks whole blocks as they come: an equal split would drop the rows that do not divide."""

    def configure(
        self, datasets: Any, world_size: int, worker_handles: Any, worker_node_ids: Any, **_: Any
    ) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            copy = dataset.copy(dataset)
            copy.context.execution_options = self._resolve_execution_options(name)
            for i, split in enumerate(copy.streaming_split(world_size, equal=False, locality_hints=worker_node_ids)):
                output[i][name] = split
        return output


class Trainer(TorchTrainer):
    """Leaves signals to the command: Ray Train would end all ranks in the middle of their step."""

    def _register_sigint_handler(self, controller: Any) -> None:
        return


def run(tree: dict[str, Any]) -> dict[str, Any]:
    """Train as configured; returns the final progress record. Everything that can be checked is checked before Ray starts."""
    began = time.perf_counter()
    config = build(tree)
    resume_from, output_dir = place(config)
    tokenizer = load_tokenizer(config.model.path)
    reward = RewardFunction.read(config.reward)
    train, validation = (
        load_problems(data, tokenizer, *config.task.reading(keep_prompts=reward is not None))
        for data in (config.task.train, config.task.validation)
    )
    scoring = scoring_of(config, reward, train.problems, validation.problems)
    manifest = manifest_of(config, train)
    if resume_from is not None:
        # A branch may change the algorithm and the seed, and a value model may be new.
        shared = {"model", "dataset", "value_model"} & set(manifest) & set(checkpoint.read_manifest(resume_from))
        common = manifest if config.branch_from is None else {name: manifest[name] for name in sorted(shared)}
        checkpoint.check_fits(resume_from, common)
    self_critic = self_critic_of(config)
    check_place(config.replay_buffer, tokenizer_hash(tokenizer), output_dir)
    _announce(config, tokenizer, train, validation, output_dir)

    cluster.connect(config.ray, config.judge.http_port)
    cluster.check_demand(cluster.demand(config))
    with run_folder.lock(output_dir):  # a run that is refused until here leaves nothing behind
        changes = keep_config(config, output_dir)
        if config.replay_buffer.url is not None:
            claim(config.replay_buffer.url, output_dir)
        for later in checkpoint.set_aside_later(output_dir, resume_from) if config.resume is not None else ():
            print(f"  set aside    {later}, as the run goes on from before it")
        # Ray Train would go on from its own notes of an earlier run in this folder; the manifests decide that here.
        (Path(output_dir) / checkpoint.FOLDER / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
        context = config.max_model_len if self_critic is None else max(config.max_model_len, self_critic.context_limit)
        weights_dir = str(Path(output_dir) / "weights")
        engines = EnginePool.start(config.model.path, config.model.dtype, context, config.engines, config.seed, weights_dir)
        coordinator = _start_coordinator(config, tokenizer, self_critic, train, validation, output_dir, resume_from, changes)
        judge.start(config.judge, scoring, output_dir)
        trainer = _trainer(config, coordinator, engines, self_critic, output_dir, manifest, resume_from)
        final = _follow(trainer, coordinator, output_dir, config.stop_grace_s)
    for warning in final["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if config.profile:
        _print_profile(Path(output_dir) / "profile")
    print(_summary(config, final, output_dir, time.perf_counter() - began))
    return final


def _follow(trainer: TorchTrainer, coordinator: CoordinatorLink, output_dir: str, stop_grace_s: float) -> dict[str, Any]:
    """Train to the end, and have the coordinator close the MLflow run however that comes; the final progress record."""
    status = "FAILED"
    try:
        shown = progress.ProgressLine(lambda: coordinator.ask("progress", timeout_s=5))
        with shown, signals.gracefully(lambda: coordinator.tell("stop"), stop_grace_s):
            trainer.fit()
        fatal: str | None = coordinator.ask("fatal_error")
        if fatal is not None:
            raise RuntimeError(fatal)
        status = "FINISHED"
        return cast(dict[str, Any], coordinator.ask("progress"))
    except signals.Stopped:
        status = "KILLED"
        raise
    except Exception:
        try:
            told = coordinator.ask("fatal_error")  # where it is gone, what the ranks said is only an echo
        except CoordinatorDied as died:
            raise CoordinatorDied(f"{died}; resume={output_dir} goes on from the newest checkpoint.") from None
        if told is not None:
            raise RuntimeError(told) from None
        raise
    finally:
        with suppress(CoordinatorDied):
            if unsent := coordinator.ask("close", status, timeout_s=2 * FLUSH_TIMEOUT_S):
                print(f"warning: {unsent}", file=sys.stderr)


def _print_profile(folder: Path) -> None:
    from pipelines.trainer.profile import timings_table

    rows = [*timings_table(folder), ("traces (Perfetto opens them)", str(folder))]
    print("\n" + progress.table(rows))


def run_name(config: RunConfig) -> str:
    """What a run is called unless it is given a name."""
    return f"{config.algorithm.name}-{config.task.name}-seed{config.seed}"


def _announce(config: RunConfig, tokenizer: Any, train: ProblemSet, validation: ProblemSet, output_dir: str) -> None:
    first = train.problems[0]
    print(
        progress.table(
            [
                ("algorithm", config.algorithm.name),
                ("task", f"{config.task.name}: {len(train.problems)} train, {len(validation.problems)} validation problems"),
                (
                    "dropped",
                    f"{train.dropped_overlong} + {validation.dropped_overlong} longer than {config.task.max_prompt_tokens} tokens",
                ),
                *reading_notes(tokenizer, train, validation),
                ("model", config.model.path),
                ("first prompt", repr(tokenizer.decode(first.prompt_ids))[:100]),
                ("stop ids", ", ".join(f"{i} {tokenizer.decode([i])!r}" for i in stop_ids(config.model.path, tokenizer))),
                ("output", output_dir),
                ("MLflow", masked(config.tracking.uri)),
            ]
        ),
        flush=True,
    )


def _start_coordinator(
    config: RunConfig,
    tokenizer: Any,
    self_critic: SelfCritic | None,
    train: ProblemSet,
    validation: ProblemSet,
    output_dir: str,
    resume_from: str | None,
    changes: str,
) -> CoordinatorLink:
    settings = CoordinatorConfig(
        seed=config.seed,
        steps=config.steps,
        logprob_diff_alarm=config.logprob_diff_alarm,
        max_missing_reward=config.max_missing_reward,
        reward_range=config.task.reward_range,
        evaluation=config.evaluation,
        eval_max_new_tokens=config.task.max_new_tokens,
        sampling=config.sampling,
        keep_rollouts=config.keep_rollouts,
        keep_steps=config.checkpoint.keep_steps,
        output_dir=output_dir,
        replay_url=config.replay_buffer.url or str(Path(output_dir) / "replay"),
        replay_start_from=config.replay_buffer.start_from,
        tokenizer_hash=tokenizer_hash(tokenizer),
        self_critic_prompt=self_critic.prompt if self_critic is not None else None,
        context_limit=self_critic.context_limit if self_critic is not None else 0,
        tracking=replace(config.tracking, run_name=config.tracking.run_name or run_name(config)),
        params=config.composed,
        tags=description("pipelines.train", sys.argv[1:])
        | {
            "algorithm": config.algorithm.name,
            "task": config.task.name,
            "git_sha": git_sha(),
            "config_digest": digest(config.composed),
            "dataset_fingerprint": train.fingerprint,
        }
        | ({"changed": changes} if changes else {}),
    )
    cost = DecodingCost.of_config(read_model_config(config.model.path))
    state = checkpoint.read_coordinator_whole(resume_from) if resume_from is not None else None
    remote: Any = ray.remote(Coordinator)
    arguments = (settings, config.algorithm, train.problems, validation.problems, cost, state)
    return CoordinatorLink(remote.options(num_cpus=cluster.COORDINATOR_CPUS).remote(*arguments))


def _trainer(
    config: RunConfig,
    coordinator: CoordinatorLink,
    engines: EnginePool,
    self_critic: SelfCritic | None,
    output_dir: str,
    manifest: dict[str, Any],
    resume_from: str | None,
) -> "Trainer":
    evaluation = Sampling(config.evaluation.temperature, config.evaluation.top_p, config.evaluation.top_k)
    sampling = {"train": config.sampling, "eval": evaluation}
    loop = LoopConfig(
        algorithm=config.algorithm,
        model=config.model,
        optimizer=config.optimizer,
        learner=config.learner,
        checkpoint=config.checkpoint,
        coordinator=coordinator,
        engines=engines,
        steps=config.steps,
        temperature=config.sampling.temperature,
        output_dir=output_dir,
        manifest=manifest,
        resume_from=resume_from,
        evaluate_every=config.evaluation.every,
        evaluate_at_start=config.evaluation.at_start,
        profiled_step=min(PROFILED_STEP, config.steps) if config.profile else None,
    )
    learner, send_ids = config.learner, config.reward.signature == "trl"
    rollouts = rollout_dataset(coordinator, engines, config.judge, config.algorithm, sampling, config.blocks, self_critic, send_ids)
    return Trainer(
        cast(Any, run_rank),
        train_loop_config=cast(Any, loop),
        **rank_options(learner),
        # Ray Train wants the checkpoints it is told of inside its own folder.
        run_config=TrainRunConfig(
            name=checkpoint.FOLDER, storage_path=output_dir, failure_config=FailureConfig(max_failures=learner.max_restarts)
        ),
        datasets={"rollouts": rollouts},
        dataset_config=UnequalSplit(),
    )


def _summary(config: RunConfig, final: dict[str, Any], output_dir: str, seconds: float) -> str:
    evaluations = sorted(final["evaluations"].items())
    rows = []
    if evaluations:
        (first, before), (last, after) = evaluations[0], evaluations[-1]
        rows = [(f"validation mean@{config.evaluation.n}", f"{before:.3f} (step {first}) -> {after:.3f} (step {last})")]
    rows += [
        ("decoding", progress.flops(final["decode_flops"])),
        ("wall time", progress.clock(seconds)),
        ("checkpoint", str(checkpoint.complete(output_dir)[-1])),
        ("MLflow run", f"{final['mlflow_run_id'] or 'not there yet'} in {masked(config.tracking.uri)}"),
        ("compare runs", f"mlflow ui --backend-store-uri {masked(config.tracking.uri)}"),
    ]
    return "\n" + progress.table(rows)


if __name__ == "__main__":
    sys.exit(command("pipelines.train", sys.argv[1:], __doc__ or "", "config", run, compose_run))
