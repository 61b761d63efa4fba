"""Datasets of problems: read whole, checked whole and rendered before anything starts."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from algorithms.types import Problem
from pipelines.data import worlds
from pipelines.data.files import DataError, read_rows
from pipelines.data.messages import PromptError, as_messages, as_tools, media_in
from pipelines.data.prompts import check_template_arguments, render_prompt
from pipelines.data.row_formats import RowFormat
from serve import typed_json
from serve.model_judge.config import ModelJudgesConfig
from serve.verifiers import find
from serve.verifiers.answer_form import AnswerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("problem_id", "data_source", "prompt", "reward_model", "extra_info", "reference_solution", "privileged_context", "tools")
EXAMPLES_SEED = 2**31 - 1  # solved examples of a reasoning-gym dataset stay apart from its problems


@dataclass(frozen=True)
class DataConfig:
    """Where problems come from: files of rows, a dataset of the hub, an embedded world, or a reasoning-gym dataset; exactly one.

    `conf/task/base.yaml` says what each key is.
    """

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "count": (1, math.inf),
        "seed": (0, math.inf),
        "few_shot": (0, math.inf),
    }

    files: list[str] | None = None
    hub: str | None = None
    hub_config: str = "default"
    format: RowFormat = field(default_factory=RowFormat)
    world: str | None = None
    reasoning_gym: str | None = None
    split: str = "train"
    count: int | None = None
    seed: int = 0
    reasoning_gym_options: dict[str, Any] | None = None
    few_shot: int = 0

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.files, self.hub, self.world, self.reasoning_gym)) != 1:
            raise DataError("a dataset needs exactly one of files=[...], hub=..., world=... and reasoning_gym=...")


@dataclass(frozen=True)
class TaskConfig:
    """Problems to train and validate on, and the budgets of a prompt and a response in tokens."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "max_prompt_tokens": (1, math.inf),
        "max_new_tokens": (1, math.inf),
        "reward_range": (-1e30, 1e30),
    }

    name: str
    train: DataConfig
    validation: DataConfig
    max_prompt_tokens: int
    max_new_tokens: int
    reward_range: tuple[float, float] | None
    complete_answer: str | None
    solution: str | None = None
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    model_judge: ModelJudgesConfig | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("complete_answer", "solution"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise DataError(f"task.{name}={getattr(self, name)}: no regular expression ({error}).") from None

    def reading(self, keep_prompts: bool) -> tuple[int, bool, dict[str, Any]]:
        """How `load_problems` reads this task's rows."""
        return self.max_prompt_tokens, keep_prompts, self.template_arguments


@dataclass(frozen=True)
class ProblemSet:
    """Rendered problems, how many were too long to use, a fingerprint of what was kept, and the columns that nothing reads."""

    problems: list[Problem]
    dropped_overlong: int
    fingerprint: str
    ignored_columns: tuple[str, ...] = ()


def load_problems(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    keep_prompts: bool = False,
    template_arguments: dict[str, Any] | None = None,
) -> ProblemSet:
    """Read, check and render a dataset; overlong prompts are dropped, by the renderer that the rollout uses, and counted.

    `keep_prompts` keeps the prompts as the rows have them in `extra_info.prompt`, for reward functions of TRL's signature.
    """
    check_template_arguments(tokenizer, template_arguments or {})
    problems, dropped, seen, ignored = list[Problem](), 0, dict[str, str](), set[str]()
    for where, row in _rows(config):
        problem = _problem(where, row, tokenizer, keep_prompts, template_arguments)
        ignored |= {name for name, value in row.items() if name not in COLUMNS and value is not None}
        if problem.problem_id in seen:
            raise DataError(f"{where}, column 'problem_id': {problem.problem_id!r} is already that of {seen[problem.problem_id]}.")
        seen[problem.problem_id] = where
        if len(problem.prompt_ids) > max_prompt_tokens:
            dropped += 1
        else:
            problems.append(problem)
    if not problems:
        raise DataError(f"{_name(config)}: no usable problem ({dropped} dropped as longer than {max_prompt_tokens} tokens).")
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(json.dumps([problem.problem_id, problem.prompt_ids, problem.ground_truth]).encode())
    return ProblemSet(problems, dropped, digest.hexdigest()[:16], tuple(sorted(ignored)))


def reading_notes(tokenizer: PreTrainedTokenizerBase, *sets: ProblemSet) -> list[tuple[str, str]]:
    """What a user should know of how rows were read: columns that nothing reads, and prompts without a chat template."""
    notes = []
    if ignored := sorted({name for one in sets for name in one.ignored_columns}):
        notes.append(("ignored", f"columns that nothing reads: {', '.join(ignored)}"))
    if not tokenizer.chat_template:
        notes.append(("no template", "the model has no chat template: messages are joined by newlines, without their roles"))
    return notes


def check_verifiable(problems: Iterable[Problem], answer: AnswerConfig) -> None:
    """LookupError or DataError for a row that no verifier can score: of an unknown source, or without a truth that it can use."""
    for problem in problems:
        verifier = find(problem.data_source)
        if not verifier.needs_truth:
            continue
        truth = typed_json.loads(problem.ground_truth)
        if truth in ("", [], {}) or (isinstance(truth, str) and not truth.strip()):
            raise DataError(
                f"{problem.place}: no ground truth, which the verifier of {problem.data_source!r} needs; name its "
                "column by task.format.label_key, or give reward.path."
            )
        if (reason := verifier.refuses(truth, answer)) is not None:
            raise DataError(f"{problem.place}: {reason}.")


def _rows(config: DataConfig) -> Iterable[tuple[str, dict[str, Any]]]:
    if config.world is not None:
        if config.world not in worlds.WORLDS:
            raise DataError(f"world={config.world}: the embedded worlds are {', '.join(worlds.WORLDS)}.")
        rows = worlds.problem_rows(config.world, config.split, config.count or 1024)
        yield from ((f"world {config.world}, row {i}", row) for i, row in enumerate(rows))
    elif config.reasoning_gym is not None:
        yield from _reasoning_gym_rows(config.reasoning_gym, config)
    else:
        yield from itertools.islice(_adapted(config), config.count)


def _adapted(config: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of all files, in this project's format; those that bring no id are called by path and row."""
    files = list(config.files) if config.files is not None else _hub_files(config)
    derived = set[str]()
    for file, short in zip(files, short_names(files), strict=True):
        for i, row in enumerate(read_rows(file)):
            if (column := media_in(row)) is not None:
                raise DataError(f"{file}, row {i}, column {column!r}: pictures, videos and sound are not supported; only text is.")
            try:
                adapted = config.format.adapt(row, f"{short}/{i}")
            except LookupError as error:
                raise DataError(f"{file}, row {i}: {error.args[0]}.") from None
            if row.get("problem_id") is None:
                if adapted["problem_id"] in derived:
                    adapted["problem_id"] = f"{short}/{i}"
                derived.add(adapted["problem_id"])
            yield f"{file}, row {i}", adapted


def short_names(files: list[str]) -> list[str]:
    """The files' names without extensions, with as much of their paths as tells them apart."""
    paths = [PurePosixPath(file.partition("?")[0]).with_suffix("").parts for file in files]
    for length in range(1, max(map(len, paths), default=0)):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return ["/".join(path) for path in paths]


def _hub_files(config: DataConfig) -> list[str]:
    """The Parquet files to which the Hugging Face hub has converted a dataset."""
    from huggingface_hub import HfFileSystem

    pattern = f"datasets/{config.hub}@~parquet/{config.hub_config}/{config.split}/*.parquet"
    try:
        files = sorted(HfFileSystem().glob(pattern))
    except Exception as error:
        raise DataError(f"hub={config.hub}: the hub could not be read ({str(error).splitlines()[0]}).") from error
    if not files:
        raise DataError(f"hub={config.hub}: no files at {pattern}; give hub_config and split as the dataset's page has them.")
    return [f"hf://{file}" for file in files]


def _reasoning_gym_rows(name: str, config: DataConfig) -> Iterable[tuple[str, dict[str, Any]]]:
    import reasoning_gym

    options = dict(config.reasoning_gym_options or {})
    try:
        dataset = reasoning_gym.create_dataset(name, size=config.count or 1024, seed=config.seed, **options)
        shown = reasoning_gym.create_dataset(name, size=config.few_shot, seed=EXAMPLES_SEED, **options) if config.few_shot else []
    except Exception as error:
        raise DataError(f"reasoning_gym={name}: the dataset could not be made ({error}).") from error
    examples = [
        {"role": role, "content": str(example[part])}
        for example in shown
        for role, part in (("user", "question"), ("assistant", "answer"))
    ]
    for i, entry in enumerate(dataset):
        yield (
            f"reasoning-gym {name}, row {i}",
            {
                "data_source": f"reasoning_gym/{name}",
                "prompt": [*examples, {"role": "user", "content": entry["question"]}],
                "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
                "extra_info": {"index": i, "options": options, "entry": entry},
                "problem_id": f"{name}/{config.seed}/{i}",
            },
        )


def _problem(
    where: str,
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    keep_prompt: bool,
    template_arguments: dict[str, Any] | None,
) -> Problem:
    source = _column(where, row, "data_source", str)
    prompt = _column(where, row, "prompt", (str, list))
    try:
        prompt_ids = render_prompt(tokenizer, prompt, as_tools(row.get("tools")), template_arguments)
    except PromptError as error:
        raise DataError(f"{where}, column 'prompt': {error}.") from error
    reward_model = _column(where, row, "reward_model", dict)
    if reward_model.get("ground_truth") is None:
        raise DataError(f"{where}, column 'reward_model': it has no 'ground_truth'.")
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise DataError(f"{where}, column 'extra_info': expected an object, found {type(extra).__name__}.")
    truth = reward_model["ground_truth"]
    shown = {"prompt": prompt if isinstance(prompt, str) else as_messages(prompt)} if keep_prompt else {}
    solution = row.get("reference_solution")
    if solution is not None and not isinstance(solution, str):
        raise DataError(f"{where}, column 'reference_solution': expected text, found {type(solution).__name__}.")
    return Problem(
        problem_id=str(_column(where, row, "problem_id", (str, int))),
        data_source=source,
        prompt_ids=prompt_ids,
        ground_truth=_kept(where, "reward_model", truth),
        extra_info=_kept(where, "extra_info", extra | shown),
        place=where,
        solution_ids=None if solution is None else tokenizer(solution, add_special_tokens=False)["input_ids"],
    )


def _kept(where: str, column: str, value: Any) -> str:
    """A value as JSON that keeps its types."""
    try:
        return typed_json.dumps(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}, column {column!r}: {error}.") from None


def _column(where: str, row: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    if name not in row or row[name] is None:
        raise DataError(f"{where}: no column {name!r} (found {', '.join(sorted(row)) or 'none'}).")
    if not isinstance(row[name], kind):
        wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise DataError(f"{where}, column {name!r}: expected {wanted}, found {type(row[name]).__name__}.")
    return row[name]


def _name(config: DataConfig) -> str:
    return config.world or config.reasoning_gym or config.hub or ", ".join(config.files or [])
