"""Numbers that decide, where they are missing, not finite or out of range."""

import math

import numpy as np
import pytest

from pipelines.rollout.scores import check_missing, check_scored, mean_score
from serve.judge import _of_verifier, _verdict


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e300, -1e300, 3.5e38])
def test_a_reward_that_no_column_can_hold_is_missing_with_a_reason(reward):
    verdict = _verdict(reward, None)
    assert verdict["reward"] is None
    assert verdict["status"].startswith("error: ")


@pytest.mark.parametrize(
    ("reward", "fits"), [(0.0, True), (1.0, True), (1.0 + 1e-9, True), (1.01, False), (-0.01, False), (1e-12, True), (2.0, False)]
)
def test_a_reward_lies_in_the_tasks_range(reward, fits):
    verdict = _verdict(reward, (0.0, 1.0))
    assert (verdict["reward"] == reward) == fits
    assert fits or "is outside task.reward_range=[0, 1]" in verdict["status"]


def row(*rewards, status="ok"):
    return {
        "reward": list(rewards),
        "acc": list(rewards),
        "reward_status": [status] * len(rewards),
        "data_source": "d",
        "n": len(rewards),
    }


def test_an_evaluation_without_a_score_is_an_error_with_the_first_reason():
    with pytest.raises(RuntimeError, match="the judge scored none of the responses; the first says: timeout: x"):
        check_scored([row(None, None, status="timeout: x"), row(None, status="other")])
    check_scored([row(None, None), row(None, 0.0)])
    check_scored([])


def test_too_many_missing_rewards_end_a_step():
    with pytest.raises(RuntimeError, match="step 3: 75% of the responses got no reward, more than max_missing_reward=50%"):
        check_missing(3, [row(1.0), row(None, None, None, status="error: x")], 0.75, 0.5)
    check_missing(3, [row(1.0)], 0.5, 0.5)


def test_no_mean_is_not_a_number_for_ranking():
    assert math.isnan(mean_score({}, 4))
    assert mean_score({"val-core/mean/acc/mean@4": 0.75, "val-core/b/acc/mean@4": 1.0}, 4) == 0.75


def test_small_rewards_are_told_apart_from_none():
    from pipelines.rollout.stages import _floats

    small = [float(np.float32(value)) for value in (5e-7, 4e-7, 1e-20)]
    assert _floats(small).tolist() == [5e-7, 4e-7, 1e-20]


def test_what_a_verdict_is_worth_is_the_tasks_range_and_how_right_it_is_stays():
    assert _of_verifier(0.0, (-1.0, 1.0)) == {"reward": -1.0, "acc": 0.0, "status": "ok"}
    assert _of_verifier(0.75, (-1.0, 1.0)) == {"reward": 0.5, "acc": 0.75, "status": "ok"}
    assert _of_verifier(1.0, None) == {"reward": 1.0, "acc": 1.0, "status": "ok"}
    assert _verdict((-1.0, 0.0), (-1.0, 1.0)) == {"reward": -1.0, "acc": 0.0, "status": "ok"}  # a function that says both
    assert _verdict((-1.0, math.nan), None)["reward"] is None
