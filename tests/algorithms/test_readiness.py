"""Readiness as AC2's section 3.1 and Appendix C define it."""

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from algorithms.readiness import PrefixError, Readiness, ReadinessConfig, audited

PAPER = ReadinessConfig(global_threshold=0.20, local_threshold=0.18, window=5)


def error(problem, value, prediction=0.5):
    return PrefixError(problem, prediction, value)


def test_all_conditions_are_needed():
    def ready_after(one, solved):
        return Readiness(PAPER).complete_step([one, error("other", 0.0, 0.0)], solved)

    assert ready_after(error("p", 0.1), {"p"}) == {"p"}
    assert ready_after(error("p", 0.18), {"p"}) == set()  # not below the local threshold
    assert ready_after(error("p", 0.1), set()) == set()  # no reference
    assert ready_after(error("p", 0.1, 0.0), {"p"}) == set()  # it has only ever answered 0
    assert ready_after(error("p", 0.1, None), {"p"}) == set()
    state = Readiness(PAPER)
    assert state.complete_step([error("p", 0.1), error("q", 0.9)], {"p"}) == set()  # globally 0.5


def test_the_global_error_is_a_mean_over_prefixes_of_the_newest_five_steps():
    state = Readiness(PAPER)
    assert math.isinf(state.global_error())
    state.complete_step([error("a", 1.0)] * 6, set())
    for _ in range(4):
        state.complete_step([error("a", 0.1)] * 2, set())
    assert abs(state.global_error() - 6.8 / 14) < 1e-12
    state.complete_step([error("a", 0.1)] * 2, set())  # the first step leaves the window
    assert abs(state.global_error() - 0.1) < 1e-12


def test_a_problem_seen_earlier_becomes_ready_when_the_critic_does():
    state = Readiness(PAPER)
    assert state.complete_step([error("early", 0.05)] + [error("x", 1.0)] * 3, {"early"}) == set()
    for _ in range(5):
        new = state.complete_step([error("x", 0.19)], {"early"})
    assert new == {"early"}  # its own last error is still the one recorded then
    assert state.is_ready("early")
    assert not state.is_ready("x")


def test_the_last_error_counts_and_a_nonzero_answer_may_be_an_older_one():
    state = Readiness(PAPER)
    state.complete_step([error("p", 0.19, 0.3)], {"p"})
    assert state.complete_step([error("p", 0.1, 0.0)], {"p"}) == {"p"}


def test_every_prediction_counts():
    """Three invalid baselines and a perfect one: a mean error of 0.75. A state without a target has no error, but an answer."""
    state = Readiness(PAPER)
    state.complete_step([*[error("p", 1.0, None)] * 3, error("p", 0.0)], set())
    assert state.global_error() == 0.75
    state = Readiness(PAPER)
    state.complete_step([error("p", None, 0.4), error("q", 0.1, 0.0)], {"p"})
    assert state.global_error() == 0.1
    assert state.complete_step([error("p", 0.1, 0.0)], {"p"}) == {"p"}


def test_a_branch_without_local_readiness_is_ready_from_its_first_step():
    state = Readiness(PAPER)
    state.complete_step([error("p", 0.1)], set())
    kept = json.loads(json.dumps(state.state()))
    assert not Readiness.restored(PAPER, kept).is_ready("never seen")
    assert Readiness.restored(ReadinessConfig(0.20, 0.18, 5, local=False), kept).is_ready("never seen")
    state.complete_step([error("p", 0.9)], set())
    assert not Readiness.restored(ReadinessConfig(0.20, 0.18, 5, local=False), state.state()).is_ready("never seen")


def test_without_local_readiness_the_global_error_decides_for_all():
    state = Readiness(ReadinessConfig(0.20, 0.18, 5, local=False))
    state.complete_step([error("p", 0.1)], set())
    assert state.is_ready("never seen")
    state.complete_step([error("p", 0.9)], set())
    assert state.is_ready("p")  # once ready, always ready


steps = st.lists(
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 0.4), st.sampled_from([None, 0.0, 0.4])), min_size=1, max_size=6),
    min_size=1,
    max_size=12,
)


@given(steps, st.sets(st.sampled_from("abcd")))
def test_once_ready_always_ready_and_a_restored_state_goes_on_the_same(history, solved):
    state, before = Readiness(PAPER), set()
    for records in history:
        errors = [PrefixError(problem, prediction, value) for problem, value, prediction in records]
        restored = Readiness.restored(PAPER, json.loads(json.dumps(state.state())))
        new = state.complete_step(errors, solved)
        assert restored.complete_step(errors, solved) == new
        assert restored == state
        assert before <= state.ready <= solved & state.nonzero
        assert new == state.ready - before
        before = set(state.ready)


@given(st.sets(st.integers(0, 200), max_size=60), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 9))
def test_audits_are_a_rounded_up_share_of_the_ready(ready, fraction, seed):
    chosen = audited(sorted(ready), fraction, np.random.default_rng(seed))
    assert chosen <= ready
    assert len(chosen) == math.ceil(len(ready) * fraction)


def test_every_ready_prefix_may_be_audited():
    counts = np.zeros(8)
    for seed in range(400):
        counts[list(audited(range(8), 0.25, np.random.default_rng(seed)))] += 1
    assert counts.sum() == 800
    assert (np.abs(counts - 100) < 50).all()
