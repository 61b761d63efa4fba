"""Composing a run's configuration from `conf/` and checking all of it before anything starts."""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms import ALGORITHMS
from algorithms.contract import Algorithm
from algorithms.critic import MAX_ANSWER_TOKENS, CriticPrompt
from pipelines.data.problems import DataConfig
from pipelines.engines.engine import EngineConfig, Sampling
from pipelines.engines.self_critic import CriticQueries
from pipelines.rollout.scores import EvaluationConfig
from pipelines.store.replay_buffer import ReplayBufferConfig
from pipelines.store.tracker import TrackingConfig, flatten
from pipelines.trainer.config import CheckpointConfig, LearnerConfig, ModelConfig, OptimizerConfig, read_model_config
from pipelines.trainer.value_folder import check_critic
from serve.judge import JudgeConfig
from serve.reward_function import RewardConfig

CONF = Path(__file__).parents[2] / "conf"
ASSETS = Path(__file__).parents[1] / "assets"
GROUPS = ("algorithm", "task", "model", "cluster", "experiment")

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says which key and what to do."""


@dataclass(frozen=True)
class TaskConfig:
    """Problems to train and validate on, and the budgets of a prompt and a response in tokens."""

    name: str
    train: DataConfig
    validation: DataConfig
    max_prompt_tokens: int
    max_new_tokens: int
    reward_range: tuple[float, float] | None  # null: not known
    complete_answer: str | None  # pattern of one in a response's text: a chunk that holds it is the judge's, not the critic's


@dataclass(frozen=True)
class RayConfig:
    """The Ray cluster to use, or the one to start."""

    address: str | None
    num_cpus: int | None
    object_store_gib: float | None


@dataclass(frozen=True)
class RunConfig:
    """A whole run, typed and checked."""

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
    composed: dict[str, Any]

    @property
    def max_model_len(self) -> int:
        """The longest prompt with its response."""
        return self.task.max_prompt_tokens + self.algorithm.max_new_tokens

    def critic_context(self, prompt: CriticPrompt) -> int:
        """The longest question to the critic with its answer: prompt, response, instruction and a reference as long as a response;
        less where the model's context or a micro-batch of the trainer holds less."""
        wanted = self.max_model_len + prompt.longest_instruction + self.algorithm.max_new_tokens + MAX_ANSWER_TOKENS
        context = read_model_config(self.model.path).get("max_position_embeddings") or wanted
        return min(wanted, context, self.learner.max_tokens_per_microbatch)


def compose(overrides: list[str], config_name: str = "config") -> DictConfig:
    """Compose `conf/` with command-line overrides; ConfigError names near matches of a mistyped key or choice."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        _check_choices(overrides)
        choices = [override for override in overrides if override.partition("=")[0].lstrip("+~") in GROUPS]
        try:
            known = hydra_compose(config_name, choices)
            values = [override for override in overrides if override not in choices]
            _check_keys(values, known)
            return hydra_compose(config_name, overrides) if values else known
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(str(error).splitlines()[0]) from error


def _check_choices(overrides: list[str]) -> None:
    for override in overrides:
        group, equals, choice = override.partition("=")
        if group not in GROUPS or not equals:
            continue
        known = sorted(file.stem for file in (CONF / group).glob("*.yaml"))
        if choice not in (*known, "null"):
            near = get_close_matches(choice, known, n=3, cutoff=0.4) or known
            raise ConfigError(f"{group}={choice}: there is no such file in conf/{group}; did you mean {', '.join(near)}?")


def _check_keys(overrides: list[str], known: DictConfig) -> None:
    container = cast(dict[str, Any], OmegaConf.to_container(known, resolve=False))
    keys = set(flatten(container)) | set(GROUPS)
    inner = {".".join(key.split(".")[:i]) for key in keys for i in range(1, key.count(".") + 1)}
    for override in overrides:
        key, equals, _ = override.lstrip("+").partition("=")
        if not equals:
            raise ConfigError(f"{override}: arguments are key=value; `--cfg job` prints all keys.")
        if key.startswith("~") or key in keys | inner or any(key.startswith(f"{open_key}.") for open_key in _open(container)):
            continue
        near = get_close_matches(key, sorted(keys), n=3, cutoff=0.6)
        near = near or [k for k in sorted(keys) if k.rpartition(".")[2] == key.rpartition(".")[2]][:3]
        raise ConfigError(
            f"{key}: no such key; " + (f"did you mean {', '.join(near)}?" if near else "`--cfg job` prints all keys.")
        )


def _open(container: dict[str, Any], prefix: str = "") -> list[str]:
    """Keys that hold a mapping of the user's own making (written as `{}`)."""
    found = []
    for name, value in container.items():
        if isinstance(value, dict):
            found += [f"{prefix}{name}"] if not value else _open(value, f"{prefix}{name}.")
    return found


def resolve_model(model: dict[str, Any]) -> dict[str, Any]:
    """The model's settings with their paths made absolute; `builtin:NAME` is a model or a prompt that ships with the project."""

    def absolute(path: str, shipped: str) -> str:
        return str(ASSETS / shipped.format(path.removeprefix("builtin:")) if path.startswith("builtin:") else Path(path).resolve())

    return model | {
        "path": absolute(model["path"], "{}"),
        "critic_prompt": absolute(model["critic_prompt"], "critic_prompts/{}.yaml"),
    }


def resolve_tracking(tracking: dict[str, Any]) -> dict[str, Any]:
    """The tracking settings with relative files made absolute: the process that writes them may run in another folder."""
    uri, artifacts = tracking["uri"], tracking["artifacts"]
    if uri.startswith("sqlite:///"):
        uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).resolve()}"
    if artifacts is not None and "://" not in artifacts:
        artifacts = str(Path(artifacts).resolve())
    return tracking | {"uri": uri, "artifacts": artifacts}


def build(tree: dict[str, Any]) -> RunConfig:
    """Typed configuration with every check that needs no data; ConfigError or ValueError in one sentence."""
    algorithm_tree = dict(tree["algorithm"])
    name = algorithm_tree.pop("name")
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm.name={name}: use one of {', '.join(ALGORITHMS)}.")
    if (critic := algorithm_tree.get("critic", {})).get("path") is not None:
        algorithm_tree["critic"] = critic | {"path": str(Path(critic["path"]).resolve())}
    task, cluster = tree["task"], tree["cluster"]
    config = RunConfig(
        algorithm=make(ALGORITHMS[name], algorithm_tree, "algorithm"),
        task=TaskConfig(
            name=task["name"],
            train=make(DataConfig, task["train"], "task.train"),
            validation=make(DataConfig, task["validation"], "task.validation"),
            max_prompt_tokens=task["max_prompt_tokens"],
            max_new_tokens=task["max_new_tokens"],
            reward_range=tuple(task["reward_range"]) if task["reward_range"] is not None else None,
            complete_answer=task["complete_answer"],
        ),
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
        **{
            key: tree[key]
            for key in (
                "seed",
                "steps",
                "output_dir",
                "resume",
                "branch_from",
                "max_missing_reward",
                "logprob_diff_alarm",
                "keep_rollouts",
            )
        },
    )
    _check(config)
    return config


def critic_queries(config: RunConfig) -> CriticQueries | None:
    """What engines need to ask the critic, for algorithms that have one in the model itself."""
    if config.algorithm.critic_optimizer is None:
        return None
    from pipelines.engines.self_critic_prompt import load_critic_prompt

    prompt = load_critic_prompt(config.model.critic_prompt, config.model.path)
    return CriticQueries(prompt, config.algorithm.max_new_tokens, config.critic_context(prompt), config.task.complete_answer)


def make(kind: type[T], values: dict[str, Any], where: str) -> T:
    """A dataclass from a mapping; ConfigError names what is missing, unknown or of another type."""
    fields = {field.name: field for field in dataclasses.fields(cast(Any, kind))}
    hints = get_type_hints(kind)
    if unknown := sorted(set(values) - set(fields)):
        near = get_close_matches(unknown[0], fields, n=3, cutoff=0.5)
        raise ConfigError(f"{where}.{unknown[0]}: no such key" + (f"; did you mean {', '.join(near)}?" if near else "."))
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise ConfigError(f"{where}.{missing[0]}: no value given.")
    values = {
        name: make(inner, value, f"{where}.{name}") if isinstance(value, dict) and (inner := _nested(hints[name])) else value
        for name, value in values.items()
    }
    for name, value in values.items():
        _check_type(f"{where}.{name}", value, str(fields[name].type))
    return kind(
        **{name: tuple(value) if isinstance(value, list) and _is_tuple(hints[name]) else value for name, value in values.items()}
    )


def _is_tuple(hint: Any) -> bool:
    return any(get_origin(one) is tuple for one in (hint, *get_args(hint)))


def _nested(hint: Any) -> Any:
    """The dataclass among the alternatives of a type, if there is one."""
    return next((one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one)), None)


_SCALARS = {"int": int, "float": (int, float), "str": str, "bool": bool}


def _check_type(where: str, value: Any, declared: str) -> None:
    declared = re.sub(r"<class '(\w+)'>", r"\1", declared)
    if value is None and "None" in declared:
        return
    parts = [part for part in declared.replace(" ", "").split("|") if part != "None"]
    if not all(part in _SCALARS for part in parts):
        return
    kinds = [_SCALARS[part] for part in parts]
    plain = tuple(k for kind in kinds for k in (kind if isinstance(kind, tuple) else (kind,)))
    if not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain):
        raise ConfigError(f"{where}={value}: expected {declared}.")


def _check(config: RunConfig) -> None:
    for field in dataclasses.fields(RunConfig):
        _check_type(field.name, getattr(config, field.name), str(field.type))
    config.sampling.check_for_training()
    if config.algorithm.replay is None and (config.replay_buffer.url or config.replay_buffer.start_from):
        raise ConfigError("replay_buffer has no effect on an algorithm that replays nothing; use algorithm=prefix_grpo.")
    model = read_model_config(config.model.path)
    if (critic := config.algorithm.critic_model) is not None and critic.path is not None:
        check_critic(critic.path, critic.head.outputs, config.model.path)
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
    for name, value in (("steps", config.steps), ("cluster.rollout.blocks", config.blocks), ("evaluation.n", config.evaluation.n)):
        if value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1.")


def digest(tree: dict[str, Any]) -> str:
    """A short fingerprint of a composed configuration."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:12]
