"""Rows of supervised fine-tuning as token ids: demonstrated responses, and values of partial responses for the self-critic."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from algorithms.self_critic import round_to_grid
from pipelines.data.files import DataError, read_rows
from pipelines.data.messages import PromptError, as_tools
from pipelines.data.prompts import load_tokenizer, render_prompt, stop_ids
from pipelines.engines.self_critic_prompt import SelfCriticPrompt, load_self_critic_prompt

Example = tuple[np.ndarray, int]  # token ids, and how many of them are the prompt
OVERLONG = ("drop", "truncate")


@dataclass(frozen=True)
class ExamplesConfig:
    """Which rows are used and how much of them; `conf/sft.yaml` says what each key is."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "max_prompt_tokens": (1, float("inf")),
        "max_response_tokens": (1, float("inf")),
    }

    files: list[str]
    max_prompt_tokens: int
    max_response_tokens: int
    overlong: str
    score_above: float | None
    template_arguments: dict[str, Any]

    def __post_init__(self) -> None:
        if self.overlong not in OVERLONG:
            raise ValueError(f"data.overlong={self.overlong}: use {' or '.join(OVERLONG)}.")


@dataclass
class Examples:
    """What came of the rows."""

    used: list[Example]
    counts: Counter[str]  # what was left out and why, and what was truncated

    def summary(self) -> str:
        """How many there are, how many were truncated, and how many left out for each reason."""
        return ", ".join([f"{len(self.used)} examples", *(f"{count} {what}" for what, count in sorted(self.counts.items()))])


def load_examples(config: ExamplesConfig, model_path: str, self_critic_prompt: str) -> Examples:
    """Read all files. DataError names file, row and column of what cannot be used, and says so if nothing is left.

    A row with a `value` teaches the critic: `response` is part of one, its value is asked for with `reference` if there is one. Any
    other row teaches the response, ended by a stop token unless it was truncated.
    """
    builder = _Builder(config, model_path, self_critic_prompt)
    found = Examples([], Counter())
    for file in config.files:
        for i, row in enumerate(read_rows(file)):
            for example in builder.examples(row, f"{file}, row {i}", found.counts):
                found.used.append(example)
    if not found.used:
        raise DataError(f"data.files: no usable example ({found.summary()}).")
    return found


class _Builder:
    def __init__(self, config: ExamplesConfig, model_path: str, self_critic_prompt: str) -> None:
        self.config, self.model_path, self.prompt_file = config, model_path, self_critic_prompt
        self.tokenizer = load_tokenizer(model_path)
        eos = self.tokenizer.eos_token_id
        self.end = eos if eos is not None else stop_ids(model_path, self.tokenizer)[0]
        self._critic: SelfCriticPrompt | None = None

    @property
    def critic(self) -> SelfCriticPrompt:
        """The self-critic's prompt, loaded with the first row that needs it."""
        if self._critic is None:
            self._critic = load_self_critic_prompt(self.prompt_file, self.model_path, self.config.template_arguments)
        return self._critic

    def examples(self, row: dict[str, Any], where: str, counts: Counter[str]) -> Iterator[Example]:
        """The row's example, or nothing and why not in the counts."""
        for column, kinds in (("prompt", (str, list)), ("response", (str,))):
            if not isinstance(row.get(column), kinds):
                raise DataError(f"{where}: column {column!r} is missing or not {' or '.join(k.__name__ for k in kinds)}.")
        if self.config.score_above is not None and not _score(row, where) > self.config.score_above:
            counts[f"left out with a score of {self.config.score_above:g} or less"] += 1
            return
        try:
            prompt = render_prompt(self.tokenizer, row["prompt"], as_tools(row.get("tools")), self.config.template_arguments)
        except PromptError as error:
            raise DataError(f"{where}, column 'prompt': {error}.") from error
        response = self._ids(row["response"])
        if len(prompt) > self.config.max_prompt_tokens:
            counts[f"left out with a prompt of more than {self.config.max_prompt_tokens} tokens"] += 1
        elif (value := row.get("value")) is None:
            yield from self._demonstration(prompt, response, counts)
        elif not 0 <= value <= 1:
            raise DataError(f"{where}: a value of {value} is not between 0 and 1.")
        else:
            yield from self._valued(prompt, response, row.get("reference"), value, counts)

    def _demonstration(self, prompt: list[int], response: list[int], counts: Counter[str]) -> Iterator[Example]:
        limit = self.config.max_response_tokens
        answer = [*response, self.end]
        if len(answer) > limit and self.config.overlong == "drop":
            counts[f"left out with a response of more than {limit} tokens"] += 1
            return
        if len(answer) > limit:
            counts[f"truncated to {limit} tokens"] += 1
        yield np.array([*prompt, *answer[:limit]], dtype=np.int32), len(prompt)

    def _valued(
        self, prompt: list[int], response: list[int], reference: str | None, value: float, counts: Counter[str]
    ) -> Iterator[Example]:
        """A question of the self-critic with its answer; too long it is left out, for what would be cut off is the state."""
        context = self.critic.query(prompt, response, self._ids(reference) if reference is not None else None).tolist()
        ids = np.array([*context, *self.critic.answer(round_to_grid(value))], dtype=np.int32)
        limit = self.config.max_prompt_tokens + self.config.max_response_tokens
        if len(ids) > limit:
            counts[f"left out with a question of more than {limit} tokens"] += 1
            return
        yield ids, len(context)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _score(row: dict[str, Any], where: str) -> float:
    score = row.get("score")
    if isinstance(score, bool | int | float):
        return float(score)
    raise DataError(f"{where}: data.score_above reads column 'score', which is missing or no number.")
