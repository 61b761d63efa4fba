"""AC2's adaptive quantities, step by step by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.entropy import EntropyControl
from algorithms.self_critic_rate import SelfCriticRate

PAPER = EntropyControl(target=0.28, step=0.02, minimum=-0.08, maximum=0.08, initial=0.06)


def test_equation_9_by_hand():
    assert PAPER.next_offset(0.06, 0.2) == pytest.approx(0.08)  # too little entropy: clip less
    assert PAPER.next_offset(0.08, 0.2) == 0.08  # at its bound
    assert PAPER.next_offset(0.06, 0.3) == pytest.approx(0.04)
    assert PAPER.next_offset(0.06, 0.28) == 0.06
    assert PAPER.next_offset(0.06, None) == 0.06
    with pytest.raises(ValueError, match=r"algorithm\.entropy\.initial"):
        EntropyControl(0.28, 0.02, -0.08, 0.08, 0.1)


@given(st.lists(st.floats(0, 2), max_size=40))
def test_the_offset_stays_within_its_bounds(entropies):
    offset = PAPER.initial
    for entropy in entropies:
        offset = PAPER.next_offset(offset, entropy)
        assert PAPER.minimum <= offset <= PAPER.maximum


def test_the_critics_rate_is_halved_after_two_steps_in_a_row_down_to_the_floor():
    root = math.sqrt(2)
    rate = SelfCriticRate(initial=2 * root * 1e-6, floor=5 * root * 1e-7, ratio=2.0, patience=2, restart_streak=True)  # Table 4
    lr, streak = rate.initial, 0
    seen = []
    for critic, actors in [(5, 2), (3, 2), (5, 2), (4.1, 2), (5, 2), (5, 2)]:
        lr, streak = rate.after_step(lr, streak, critic, actors)
        seen.append(lr)
    assert seen == pytest.approx([2e-6 * root] * 3 + [1e-6 * root] * 2 + [5e-7 * root])
    for _ in range(20):
        lr, streak = rate.after_step(lr, streak, 9.0, 1.0)
    assert lr == rate.floor
    assert rate.after_step(lr, 0, 4.0, 2.0) == (lr, 0)  # equal to twice is not above it
