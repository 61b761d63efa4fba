"""The critic that is the language model itself: its grid of answers, its prompt around a state, its targets (AC2 3.2, 3.3, C)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVELS = 10
VALUES = tuple(i / LEVELS for i in range(LEVELS + 1))  # 0, 0.1, ..., 1
MAX_ANSWER_TOKENS = 4  # that the critic may generate, the end of its turn included

_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


def round_to_grid(value: float) -> float:
    """The nearest grid value, ties down (0.25 becomes 0.2)."""
    if not 0 <= value <= 1:
        raise ValueError(f"a value of {value} is not between 0 and 1.")
    return VALUES[max(0, math.ceil(LEVELS * value - 0.5 - 1e-9))]  # means of tenths are off by binary fractions


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
class CriticPrompt:
    """Token ids that turn a state into the question for its value: everything that follows a partial response.

    The instruction is a new user turn, and the reply is begun for the model, so that only the number is left to say.
    """

    close_thinking: tuple[int, ...]  # ends the thinking section of a response that has not ended it; empty for models without
    plain: tuple[int, ...]
    before_reference: tuple[int, ...]
    after_reference: tuple[int, ...]
    end_of_turn: int  # that ends the critic's answer

    def query(self, prompt: Sequence[int], response: Sequence[int], reference: Sequence[int] | None) -> list[int]:
        """The critic's context at the state `prompt + response`, with a reference solution or without."""
        closing = () if self._thinking_ended(response) else self.close_thinking
        if reference is None:
            return [*prompt, *response, *closing, *self.plain]
        return [*prompt, *response, *closing, *self.before_reference, *reference, *self.after_reference]

    def _thinking_ended(self, response: Sequence[int]) -> bool:
        size = len(self.close_thinking)
        if not size:
            return True
        return any(tuple(response[i : i + size]) == self.close_thinking for i in range(len(response) - size + 1))


def group_target(values: np.ndarray, minimum: int) -> float | None:
    """The critic's target at a prefix: the mean of its group's endpoint values on the grid.

    `values` [n] has NaN where a value is invalid or the judge failed; fewer than `minimum` valid ones give no target.
    """
    valid = values[~np.isnan(values)]
    return round_to_grid(float(valid.mean())) if len(valid) >= minimum else None


def critic_error(prediction: float | None, target: float) -> float:
    """`|V(s) - target|`, and 1 for an answer that was no value (AC2 Appendix C, Readiness)."""
    return 1.0 if prediction is None else abs(prediction - target)


def endpoint_advantages(values: np.ndarray, from_critic: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`A_i = v_i - mean_j v_j` within a group, and which continuations the actor learns from; all [n].

    A value that the critic could not give (NaN) counts as the mean of the group's valid ones, or 0 without any, and its
    continuation gets no loss. A reward that the judge could not give counts as 0 and keeps its continuation's loss (Appendix C).
    """
    filled = np.where(np.isnan(values) & ~from_critic, 0.0, values)
    invalid = np.isnan(filled)
    valid = values[~np.isnan(values)]
    filled = np.where(invalid, valid.mean() if len(valid) else 0.0, filled)
    return filled - filled.mean(), ~invalid
