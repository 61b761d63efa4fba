"""A run's configuration, typed, with every check that needs no data made before anything starts."""

import dataclasses
import hashlib
import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from algorithms.base import Algorithm
from algorithms.flops import DecodingCost
from algorithms.self_critic import MAX_ANSWER_TOKENS, SelfCriticPrompt
from pipelines.config.make import ConfigError, check_bounds, check_type, make
from pipelines.data.model_folder import has_language_part, read_model_config
from pipelines.data.problems import TaskConfig
from pipelines.engines.config import EngineConfig, Sampling
from pipelines.engines.self_critic import SelfCritic
from pipelines.rollout.scores import EvaluationConfig
from pipelines.store.checkpoint import CheckpointConfig
from pipelines.store.replay_buffer import ReplayBufferConfig
from pipelines.store.tracker import TrackingConfig
from pipelines.trainer.config import LearnerConfig, ModelConfig, OptimizerConfig
from pipelines.trainer.value_folder import check_value_model
from serve.judge import JudgeConfig
from serve.reward_function import RewardConfig

ASSETS = Path(__file__).parents[1] / "assets"


@dataclass(frozen=True)
class RayConfig:
    """The Ray cluster to use, or the one to start."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "num_cpus": (1, math.inf),
        "object_store_gib": (1e-3, math.inf),
    }

    address: str | None
    num_cpus: int | None
    object_store_gib: float | None


@dataclass(frozen=True)
class RunConfig:
    """A whole run, typed and checked."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "seed": (0, 2**31 - 1),
        "steps": (1, math.inf),
        "blocks": (1, math.inf),
        "max_missing_reward": (0, 1),
        "logprob_diff_alarm": (0, math.inf),
        "keep_rollouts": (0, math.inf),
        "stop_grace_s": (0, 1e7),
    }

    seed: int
    steps: int
    output_dir: str | None
    resume: str | None
    branch_from: str | None
    algorithm: Algorithm
    task: TaskConfig
    model: ModelConfig
    ray: RayConfig
    engines: EngineConfig
    learner: LearnerConfig
    judge: JudgeConfig
    reward: RewardConfig
    blocks: int
    optimizer: OptimizerConfig
    sampling: Sampling
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    tracking: TrackingConfig
    replay_buffer: ReplayBufferConfig
    max_missing_reward: float
    logprob_diff_alarm: float
    keep_rollouts: int | None
    stop_grace_s: float
    profile: bool
    composed: dict[str, Any]

    @property
    def max_model_len(self) -> int:
        """The longest prompt with its response."""
        return self.task.max_prompt_tokens + self.algorithm.max_new_tokens

    def self_critic_context(self, prompt: SelfCriticPrompt) -> int:
        """The longest question to the self-critic with its answer: prompt, response, instruction, and a reference as long
        as a response; less where the model's context or a micro-batch of the trainer holds less."""
        wanted = self.max_model_len + prompt.longest_instruction + self.algorithm.max_new_tokens + MAX_ANSWER_TOKENS
        context = read_model_config(self.model.path).get("max_position_embeddings") or wanted
        return min(wanted, context, self.learner.max_tokens_per_microbatch)


def resolve_model(model: dict[str, Any]) -> dict[str, Any]:
    """The model's settings with their paths made absolute; `builtin:NAME` is a model or a prompt that ships with the project."""

    def absolute(path: str, shipped: str) -> str:
        return str(ASSETS / shipped.format(path.removeprefix("builtin:")) if path.startswith("builtin:") else Path(path).resolve())

    return model | {
        "path": absolute(model["path"], "{}"),
        "self_critic_prompt": absolute(model["self_critic_prompt"], "self_critic_prompts/{}.yaml"),
    }


def resolve_tracking(tracking: dict[str, Any]) -> dict[str, Any]:
    """The tracking settings with relative files made absolute: the process that writes them may run in another folder."""
    uri, artifacts = tracking["uri"], tracking["artifacts"]
    if uri.startswith("sqlite:///"):
        uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).resolve()}"
    if artifacts is not None and "://" not in artifacts:
        artifacts = str(Path(artifacts).resolve())
    return tracking | {"uri": uri, "artifacts": artifacts}


def absolute_paths(tree: dict[str, Any]) -> dict[str, Any]:
    """A composed configuration that means the same in another folder; a path that must still be given stays as it is."""
    model = tree["model"] if tree["model"]["path"] == "???" else resolve_model(tree["model"])
    return tree | {"model": model, "tracking": resolve_tracking(tree["tracking"])}


def algorithm_class(path: str) -> type[Algorithm]:
    """The class that `algorithm.implementation` names as `module.Class`; ConfigError if there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"algorithm.implementation={path}: cannot be imported ({error}); give it as module.Class.") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"algorithm.implementation={path}: not a subclass of algorithms.base.Algorithm.")
    return found


def build(tree: dict[str, Any]) -> RunConfig:
    """Typed configuration with every check that needs no data; ConfigError or ValueError in one sentence."""
    algorithm = dict(tree["algorithm"])
    implementation = algorithm_class(algorithm.pop("implementation"))
    if (critic := algorithm.get("critic", {})).get("path") is not None:
        algorithm["critic"] = critic | {"path": str(Path(critic["path"]).resolve())}
    cluster = tree["cluster"]
    task = {name: tree["task"].get(name) for name in (field.name for field in dataclasses.fields(TaskConfig))}
    whole = ["seed", "steps", "output_dir", "resume", "branch_from", "max_missing_reward", "logprob_diff_alarm", "keep_rollouts"]
    whole += ["stop_grace_s"]
    hints = {field.name: str(field.type) for field in dataclasses.fields(RunConfig)}
    for name, key in [*((name, name) for name in whole), ("blocks", "cluster.rollout.blocks")]:
        value = cluster["rollout"]["blocks"] if name == "blocks" else tree[name]
        check_type(key, value, hints[name])
        check_bounds(RunConfig, name, value, key)
    config = RunConfig(
        algorithm=make(implementation, algorithm, "algorithm"),
        task=make(TaskConfig, task, "task"),
        model=make(ModelConfig, resolve_model(tree["model"]), "model"),
        ray=make(RayConfig, cluster["ray"], "cluster.ray"),
        engines=make(EngineConfig, cluster["engines"], "cluster.engines"),
        learner=make(LearnerConfig, cluster["learner"], "cluster.learner"),
        judge=make(JudgeConfig, cluster["judge"], "cluster.judge"),
        reward=make(RewardConfig, tree["reward"], "reward"),
        blocks=cluster["rollout"]["blocks"],
        optimizer=make(OptimizerConfig, tree["optimizer"], "optimizer"),
        sampling=make(Sampling, tree["sampling"], "sampling"),
        evaluation=make(EvaluationConfig, tree["evaluation"], "evaluation"),
        checkpoint=make(CheckpointConfig, tree["checkpoint"], "checkpoint"),
        tracking=make(TrackingConfig, resolve_tracking(tree["tracking"]), "tracking"),
        replay_buffer=make(ReplayBufferConfig, tree["replay_buffer"], "replay_buffer"),
        composed=tree,
        **{key: tree[key] for key in (*whole, "profile")},
    )
    _check(config)
    return config


def self_critic_of(config: RunConfig) -> SelfCritic | None:
    """What engines need to ask the model for values, for algorithms that do."""
    return self_critic(config) if config.algorithm.self_critic_asked else None


def self_critic(config: RunConfig) -> SelfCritic:
    """What engines need to ask this run's model for values."""
    from pipelines.engines.self_critic_prompt import load_self_critic_prompt

    task = config.task
    prompt = load_self_critic_prompt(config.model.self_critic_prompt, config.model.path, task.template_arguments, task.solution)
    return SelfCritic(prompt, config.self_critic_context(prompt), task.complete_answer)


def _check(config: RunConfig) -> None:
    for field in dataclasses.fields(RunConfig):
        check_type(field.name, getattr(config, field.name), str(field.type))
    config.sampling.check_for_training()
    if config.algorithm.replay is None and (config.replay_buffer.url or config.replay_buffer.start_from):
        raise ConfigError("replay_buffer has no effect on an algorithm that replays nothing; use algorithm=prefix_grpo.")
    _check_rewards(config)
    model = read_model_config(config.model.path)
    DecodingCost.of_config(model)  # a model whose cost cannot be counted is refused before anything starts
    _check_engines_open(config, model)
    if (critic := config.algorithm.value_model) is not None and critic.path is not None:
        check_value_model(critic.path, critic.head.outputs, config.model.path)
    context = model.get("max_position_embeddings")
    if context is not None and config.max_model_len > context:
        raise ConfigError(
            f"task.max_prompt_tokens={config.task.max_prompt_tokens} + algorithm.max_new_tokens={config.algorithm.max_new_tokens} "
            f"exceed the model's context of {context} tokens: lower one of them."
        )
    if config.max_model_len > config.learner.max_tokens_per_microbatch:
        raise ConfigError(
            f"cluster.learner.max_tokens_per_microbatch={config.learner.max_tokens_per_microbatch} cannot hold one sequence of "
            f"{config.max_model_len} tokens (prompt and response budgets): raise it."
        )


def _check_engines_open(config: RunConfig, model: dict[str, Any]) -> None:
    """ConfigError where engines on CPUs would fail on what the model has beside ordinary attention."""
    if config.engines.num_gpus:
        return
    if "linear_attention" in (model.get("layer_types") or []) and config.model.dtype != "bfloat16":
        raise ConfigError(
            f"model.dtype={config.model.dtype}: the engines run this model's gated delta nets on CPUs in bfloat16 only; give "
            "model.dtype=bfloat16."
        )
    if has_language_part(model) and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"model.path={config.model.path}: vLLM opens a model that also sees pictures with torchvision, which is not here; "
            "install the torchvision that belongs to this torch."
        )


def _check_rewards(config: RunConfig) -> None:
    """ConfigError where an algorithm's critic gives values that the task's rewards may not have."""
    if not config.algorithm.self_critic_asked:
        return
    given = config.task.reward_range
    if given is None and config.reward.path is not None:
        raise ConfigError(
            f"task.reward_range=null: the critic of algorithm={config.algorithm.name} gives values from 0 to 1, and nothing says "
            "that the reward function does; give task.reward_range=[0,1] if it does, and scale its rewards if not."
        )
    if given is not None and not 0 <= given[0] <= given[1] <= 1:
        raise ConfigError(
            f"task.reward_range={list(given)}: the critic of algorithm={config.algorithm.name} gives values from 0 to 1; scale the "
            "rewards to lie there."
        )


def digest(tree: dict[str, Any]) -> str:
    """A short fingerprint of a composed configuration."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:12]
