"""The self-critic, the language model itself: its grid of answers, its prompt around a state, its targets (AC2 3.2, 3.3, C)."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

LEVELS = 10
VALUES = tuple(i / LEVELS for i in range(LEVELS + 1))  # 0, 0.1, ..., 1
MAX_ANSWER_TOKENS = 4  # what the self-critic may generate, the end of its turn included

TIE = 1e-5  # rewards come with six or seven digits: a mean this close above a tie is the tie
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


def round_to_grid(value: float) -> float:
    """The nearest grid value, ties down (0.25 becomes 0.2)."""
    if not 0 <= value <= 1:
        raise ValueError(f"a value of {value} is not between 0 and 1.")
    return VALUES[max(0, math.ceil(LEVELS * value - 0.5 - TIE))]


def parse_value(text: str) -> float | None:
    """The first number in the critic's answer that is a grid value; None if there is none."""
    for match in _NUMBER.finditer(text):
        scaled = LEVELS * float(match.group())
        if scaled <= LEVELS and abs(scaled - round(scaled)) < 1e-9:
            return VALUES[round(scaled)]
    return None


def format_value(value: float) -> str:
    """A grid value as the critic writes it: `0`, `0.1`, ... `1`."""
    return f"{round(value, 1):g}"


@dataclass(frozen=True)
class SelfCriticPrompt:
    """Token ids that turn a state into the question for its value: everything that follows a partial response.

    The instruction is a new user turn, and the reply is begun for the model, so that only the number is left to say.
    """

    close_thinking: tuple[int, ...]  # ends the thinking section of a response that has not ended it; empty for models without
    plain: tuple[int, ...]
    before_reference: tuple[int, ...]
    after_reference: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]  # tokens of each grid value, and the one that ends the critic's turn
    block: Callable[[np.ndarray], np.ndarray | None] | None = None  # finds the solution in what follows the thinking

    def answer(self, value: float) -> tuple[int, ...]:
        """What the critic shall say for a grid value."""
        return self.answers[round(LEVELS * value)]

    def query(self, prompt: ArrayLike, response: ArrayLike, reference: ArrayLike | None) -> np.ndarray:
        """The critic's context at the state `prompt + response`, with a reference solution or without; token ids, int32."""
        response = _ids(response)
        closing = () if self._ends_of_thinking(response).size else self.close_thinking
        if reference is None:
            parts = [_ids(prompt), response, _ids(closing), _ids(self.plain)]
        else:
            after = [_ids(self.before_reference), _ids(reference), _ids(self.after_reference)]
            parts = [_ids(prompt), response, _ids(closing), *after]
        return np.concatenate(parts)

    def solution(self, response: ArrayLike) -> np.ndarray:
        """The part of a finished response that can serve as a reference, without its thinking and the end of its turn.

        That is its `block` (the proof of AC2's problems), or all of it where the task names none or the response has none.
        """
        response = _ids(response)
        if (ends := self._ends_of_thinking(response)).size:
            response = response[ends[-1] :]
        response = response[:-1] if len(response) and response[-1] == self.end_of_turn else response
        block = self.block(response) if self.block is not None else None
        return response if block is None else _ids(block)

    @property
    def longest_instruction(self) -> int:
        """Tokens that a question adds to a state, without the reference."""
        return len(self.close_thinking) + max(len(self.plain), len(self.before_reference) + len(self.after_reference))

    @property
    def end_of_turn(self) -> int:
        return self.answers[0][-1]

    def _ends_of_thinking(self, response: np.ndarray) -> np.ndarray:
        """Places right after each closing of a thinking section."""
        size = len(self.close_thinking)
        if not size or len(response) < size:
            return np.zeros(0, int)
        windows = np.lib.stride_tricks.sliding_window_view(response, size)
        return np.flatnonzero((windows == np.asarray(self.close_thinking)).all(1)) + size


def _ids(ids: ArrayLike) -> np.ndarray:
    return np.asarray(ids, np.int32)


def group_target(values: np.ndarray, minimum: int) -> float | None:
    """The critic's target at a prefix: the mean of its group's endpoint values on the grid.

    `values` [n] has NaN where a value is invalid or the judge failed; fewer than `minimum` valid ones give no target.
    """
    valid = values[~np.isnan(values)]
    return round_to_grid(float(valid.mean())) if len(valid) >= minimum else None


def value_error(prediction: float | None, target: float) -> float:
    """`|V(s) - target|`, and 1 for an answer that was no value (AC2 Appendix C, Readiness)."""
    return 1.0 if prediction is None else abs(prediction - target)


def endpoint_advantages(
    values: np.ndarray, self_scored: np.ndarray, judge_failure: str = "zero", invalid_value: str = "mean_of_valid"
) -> tuple[np.ndarray, np.ndarray]:
    """`A_i = v_i - mean_j v_j` within a group, and which continuations the actor learns from; all [n].

    A value that the critic could not give (NaN) counts as the mean of the group's valid ones, or 0 without any, and its
    continuation gets no loss. A reward that the judge could not give counts as 0 and keeps its continuation's loss (Appendix C), or
    with `leave_out` takes no part and has none. `invalid_value=mean_with_failures` has such a 0 in the mean that stands in, too.
    """
    invalid = np.isnan(values)
    mean = values[~invalid].mean() if not invalid.all() else 0.0
    if invalid_value == "mean_with_failures" and judge_failure == "zero":
        known = ~invalid | ~self_scored
        mean = np.where(invalid, 0.0, values)[known].mean() if known.any() else 0.0
    filled = np.where(invalid, np.where(self_scored, mean, 0.0), values)
    if judge_failure == "zero":
        return filled - filled.mean(), ~(invalid & self_scored)
    counted = ~invalid | self_scored
    baseline = filled[counted].mean() if counted.any() else 0.0
    return np.where(counted, filled - baseline, 0.0), ~invalid
