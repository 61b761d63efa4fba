"""Prefix sampling as AC2's Appendix C has it: permute and cycle, one trajectory at random, cuts uniform on the grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.replay import Replay
from algorithms.types import Problem, StoredTrajectory
from tests.conftest import configure


class State:
    """A plan's view of a buffer and a dataset, without a coordinator."""

    def __init__(self, lengths, seed=0, round=0):
        self.stored = [StoredTrajectory(i, problem, length, 1.0, 0) for i, (problem, length) in enumerate(lengths)]
        self.rng, self.round, self.kept_groups, self.fresh = np.random.default_rng(seed), round, 0, 0
        self.step, self.memory = 1, None

    def trajectories(self):
        return self.stored

    def problem(self, problem_id):
        return Problem(problem_id, "d", [1], "t")

    def prefix(self, trajectory, cut):
        return [trajectory.sequence] * cut

    def fresh_problems(self, count):
        self.fresh += count
        return [Problem(f"fresh{i}", "d", [1], "t") for i in range(count)]


REPLAY = Replay(capacity=256, refill_problems=3, cut_grid=10, max_cut_fraction=0.9)


@given(st.integers(1, 500), st.integers(1, 60), st.integers(0, 100))
def test_cuts_are_multiples_of_the_grid_within_the_fraction(length, grid, seed):
    replay = Replay(256, 1, grid, 0.9)
    cut = replay.cut(length, np.random.default_rng(seed))
    assert cut % grid == 0
    assert 0 <= cut <= 0.9 * length


def test_cuts_are_uniform_and_reach_both_ends():
    rng = np.random.default_rng(0)
    cuts = [REPLAY.cut(50, rng) for _ in range(5000)]  # 0.9 x 50 = 45: cuts at 0, 10, 20, 30, 40
    values, counts = np.unique(cuts, return_counts=True)
    assert values.tolist() == [0, 10, 20, 30, 40]
    assert (np.abs(counts - 1000) < 5 * np.sqrt(800)).all()
    exact = {REPLAY.cut(100, rng) for _ in range(2000)}  # 0.9 x 100 is a multiple itself and may be cut at
    assert max(exact) == 90


def test_paper_scale_cuts():
    replay = Replay(256, 192, 10_000, 0.9)
    rng = np.random.default_rng(0)
    assert {replay.cut(50_000, rng) for _ in range(500)} == {0, 10_000, 20_000, 30_000, 40_000}
    assert {replay.cut(11_111, rng) for _ in range(100)} == {0}  # 0.9 x 11111 = 9999.9


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 50))
def test_problems_are_permuted_and_cycled(problems, count, seed):
    state = State([(f"p{i % problems}", 50) for i in range(2 * problems)], seed)
    drawn = [problem.problem_id for problem, _ in REPLAY.states(state, count)]
    assert len(drawn) == count
    assert drawn == [drawn[i % problems] for i in range(count)]  # one order, again and again
    assert len(set(drawn)) == min(problems, count)
    assert state.fresh == 0


def test_a_problems_trajectories_are_taken_at_random():
    state = State([("p", 50), ("p", 50), ("p", 50)])
    prefixes = [prefix for _, prefix in REPLAY.states(state, 300) if prefix]
    assert {prefix[0] for prefix in prefixes} == {0, 1, 2}


def test_fresh_problems_stand_in_while_the_buffer_is_empty():
    state = State([])
    states = REPLAY.states(state, 4)
    assert [prefix for _, prefix in states] == [[]] * 4
    assert state.fresh == 4


def test_prefix_grpo_plans_refills_once_and_counts_the_prefix_in_the_budget():
    algorithm = configure(
        "algorithm=prefix_grpo", "algorithm.problems_per_step=6", "algorithm.max_rounds=2", "algorithm.dynamic_sampling=true"
    ).algorithm
    rows = algorithm.plan(State([("a", 100), ("b", 60)]))
    refill, train = [r for r in rows if r.purpose == "refill"], [r for r in rows if r.purpose == "train"]
    assert [(r.n, r.prefix_ids, r.max_new_tokens) for r in refill] == [
        (1, [], algorithm.max_new_tokens)
    ] * algorithm.replay.refill_problems
    assert len(train) == 6
    assert all(r.n == algorithm.group_size and len(r.prefix_ids) + r.max_new_tokens == algorithm.max_new_tokens for r in train)
    assert any(r.prefix_ids for r in train)
    assert {r.purpose for r in algorithm.plan(State([("a", 100)], round=1))} == {"train"}
    assert algorithm.plan(State([("a", 100)], round=2)) == []


def test_a_cut_leaves_something_to_roll_out():
    with pytest.raises(ValueError, match="max_cut_fraction=1: must be below 1"):
        Replay(capacity=1, refill_problems=1, cut_grid=1, max_cut_fraction=1.0)
