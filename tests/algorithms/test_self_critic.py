"""The critic's grid, prompt, targets and advantages, with numbers worked out by hand from AC2's appendix."""

import itertools
from decimal import ROUND_HALF_DOWN, Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.self_critic import (
    VALUES,
    SelfCriticPrompt,
    endpoint_advantages,
    format_value,
    group_target,
    parse_value,
    round_to_grid,
    value_error,
)


@given(st.integers(0, 1000))
def test_rounding_is_decimal_half_down(thousandths):
    expected = Decimal(thousandths).scaleb(-3).quantize(Decimal("0.1"), rounding=ROUND_HALF_DOWN)
    assert round_to_grid(thousandths / 1000) == float(expected)


def test_ties_go_down_whatever_binary_fractions_make_of_them():
    for i in range(10):
        assert round_to_grid((VALUES[i] + VALUES[i + 1]) / 2) == VALUES[i]
    assert round_to_grid(sum([0.1] * 8 + [0.2] * 8) / 16) == 0.1  # 0.15 in sixteenths of a group
    with pytest.raises(ValueError, match="not between 0 and 1"):
        round_to_grid(1.01)


def float32(value):
    """A reward as it comes from its float32 column."""
    return float(str(np.float32(value)))


@pytest.mark.parametrize("denominator", [7, 10])
@pytest.mark.parametrize("size", [8, 16])
def test_targets_of_sevenths_and_tenths_are_those_of_exact_fractions(denominator, size):
    for points, count in itertools.product(range(denominator + 1), range(size + 1)):
        exact = Fraction(points, denominator) * count / size
        wanted = min(range(11), key=lambda tenth: (abs(Fraction(tenth, 10) - exact), tenth)) / 10
        for rounded in (float32(points / denominator), round(points / denominator, 6)):
            assert group_target(np.array([rounded] * count + [0.0] * (size - count)), 1) == wanted, (points, count)


def test_the_two_ties_that_six_digits_hid():
    assert group_target(np.array([round(4 / 7, 6)] * 7 + [0.0] * 9), 8) == 0.2
    assert group_target(np.array([round(6 / 7, 6)] * 14 + [0.0] * 2), 8) == 0.7


def test_every_grid_value_survives_writing_and_reading():
    assert [format_value(value) for value in VALUES] == ["0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1"]
    assert [parse_value(format_value(value)) for value in VALUES] == list(VALUES)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 0.7", 0.7),
        ("1.0", 1.0),
        (".3", 0.3),
        ("0.35", None),
        ("2", None),
        ("", None),
        ("high", None),
        ("5 or 0.5", 0.5),
        ("0.50", 0.5),
    ],
)
def test_the_first_grid_value_is_read(text, value):
    assert parse_value(text) == value


ANSWERS = tuple((10 + i, 0) for i in range(11))
PROMPT = SelfCriticPrompt(close_thinking=(9,), plain=(1, 2), before_reference=(3,), after_reference=(4, 2), answers=ANSWERS)


def test_the_question_follows_the_state():
    assert PROMPT.query([50], [60, 61], None).tolist() == [50, 60, 61, 9, 1, 2]
    assert PROMPT.query([50], [60, 9, 61], None).tolist() == [50, 60, 9, 61, 1, 2]  # its thinking has ended
    assert PROMPT.query([50], [], [70, 71]).tolist() == [50, 9, 3, 70, 71, 4, 2]
    without = SelfCriticPrompt((), (1,), (3,), (4,), ANSWERS)
    assert without.query([50], [60], None).tolist() == [50, 60, 1]
    long = SelfCriticPrompt((9, 8), (1,), (3,), (4,), ANSWERS)
    assert long.query([50], [9, 7, 8], None).tolist() == [50, 9, 7, 8, 9, 8, 1]
    assert long.query([50], [7, 9, 8], None).tolist() == [50, 7, 9, 8, 1]


def test_what_serves_as_a_reference_and_what_an_answer_is():
    assert PROMPT.solution([5, 9, 6, 7, 0]).tolist() == [6, 7]  # after its thinking, without the end of its turn
    assert PROMPT.solution([5, 6]).tolist() == [5, 6]
    assert PROMPT.answer(0.3) == (13, 0)
    assert PROMPT.longest_instruction == 1 + 3


NAN = float("nan")


def test_targets_by_hand():
    assert group_target(np.array([1.0, 0.0, 0.0, 0.0]), 2) == 0.2  # 0.25, a tie
    assert group_target(np.array([1.0, NAN, 0.5, NAN]), 2) == 0.7  # 0.75, a tie
    assert group_target(np.array([1.0, NAN, NAN, NAN]), 2) is None
    assert group_target(np.array([NAN, NAN]), 1) is None
    assert (value_error(None, 0.0), value_error(0.5, 0.2)) == (1.0, pytest.approx(0.3))


def test_advantages_by_hand():
    critic = np.array([True, True, False, False])
    values, mask = endpoint_advantages(np.array([0.8, NAN, 1.0, 0.0]), critic)  # an answer that was no value: the mean, 0.6
    assert values == pytest.approx([0.2, 0.0, 0.4, -0.6])
    assert mask.tolist() == [True, False, True, True]
    values, mask = endpoint_advantages(np.array([0.8, 0.4, 1.0, NAN]), critic)  # the judge failed: reward 0, and its loss stays
    assert values == pytest.approx([0.25, -0.15, 0.45, -0.55])
    assert mask.all()
    values, mask = endpoint_advantages(np.array([0.8, 0.4, 0.9, NAN]), critic, "leave_out")  # or it takes no part: the mean is 0.7
    assert values.tolist() == pytest.approx([0.1, -0.3, 0.2, 0.0])
    assert mask.tolist() == [True, True, True, False]
    values, mask = endpoint_advantages(np.full(4, NAN), np.ones(4, bool))  # no valid value at all
    assert values.tolist() == [0.0] * 4
    assert not mask.any()


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=16), st.data())
def test_advantages_sum_to_zero_over_the_group(values, data):
    numbers = np.array([NAN if value is None else value for value in values])
    critic = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    advantages, mask = endpoint_advantages(numbers, critic)
    assert abs(advantages.sum()) < 1e-9
    assert (mask == ~(np.isnan(numbers) & critic)).all()
    assert np.abs(advantages[~mask]).max(initial=0.0) < 1 + 1e-9
