import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.advantages import group_advantages
from algorithms.types import Group, Problem, mean_metrics
from pipelines.config.compose import compose, resolved
from tests.conftest import configure

FILES = ("task.train.files=[a]", "task.validation.files=[b]")

rewards = st.lists(st.one_of(st.floats(0, 1), st.just(float("nan"))), min_size=2, max_size=16)


def group(values, truncated=None):
    n = len(values)
    return Group(np.array(values, float), np.array(truncated or [False] * n), np.full(n, np.nan), np.zeros(n, bool))


def grpo(**fields):
    return dataclasses.replace(configure().algorithm, **fields)


def test_advantages_by_hand():
    assert group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), False).tolist() == [0.5, -0.5, -0.5, 0.5]
    scaled = group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), True)
    assert scaled == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / np.sqrt(1 / 3), rel=1e-4)


@given(rewards, st.booleans())
def test_advantages_are_centred_and_missing_rewards_take_no_part(values, normalize):
    values = np.array(values)
    advantages = group_advantages(values, normalize)
    valid = ~np.isnan(values)
    assert np.isfinite(advantages).all()
    assert advantages.sum() == pytest.approx(0, abs=1e-4)
    assert (advantages[~valid] == 0).all()
    if valid.sum() >= 2 and not normalize:
        assert advantages[valid] == pytest.approx(values[valid] - values[valid].mean())


def test_missing_reward_is_masked_not_zero():
    credit = grpo().credit(group([1.0, float("nan"), 0.0, 1.0]))
    assert credit.actor_mask.tolist() == [True, False, True, True]
    assert credit.advantages.tolist() == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3])


def test_overlong_filter_masks_truncated_but_keeps_their_reward_in_the_baseline():
    credit = grpo(overlong_filter=True).credit(group([1.0, 0.0], truncated=[False, True]))
    assert credit.actor_mask.tolist() == [True, False]
    assert credit.advantages.tolist() == [0.5, -0.5]


def test_dynamic_sampling_drops_groups_of_one_reward_value():
    assert grpo().credit(group([1.0, 1.0])).keep
    assert not grpo(dynamic_sampling=True).credit(group([1.0, 1.0])).keep
    assert not grpo(dynamic_sampling=True).credit(group([float("nan")] * 2)).keep
    assert grpo(dynamic_sampling=True).credit(group([1.0, 0.0])).keep


class State:
    kept_groups, round = 5, 0

    def fresh_problems(self, count):
        return [Problem(str(i), "s", [1], "") for i in range(count)]


def test_plan_asks_for_what_is_missing():
    rows = grpo(problems_per_step=8, group_size=4).plan(State())
    assert len(rows) == 3
    assert {row.n for row in rows} == {4}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.group_size=1", "at least 2"),
        ("algorithm.minibatches=3", "does not divide"),
        ("algorithm.loss_aggregation=mean", "seq-mean-token-mean"),
        ("algorithm.kl_estimator=k4", "k1"),
        ("algorithm.max_rounds=2", "dynamic_sampling"),
    ],
)
def test_settings_that_cannot_work_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        configure(override)


def test_metrics_of_several_updates():
    merged = mean_metrics([{"a": 1.0, "b_max": 1.0}, {"a": 3.0, "b_max": 5.0, "c": 2.0}])
    assert merged == {"a": 2.0, "b_max": 5.0, "c": 2.0}


def test_a_judge_that_failed_leaves_out_or_counts_as_zero_by_choice():
    left_out = grpo(judge_failure="leave_out").credit(group([1.0, 0.0, np.nan, 1.0]))
    assert left_out.advantages.tolist() == pytest.approx([1 / 3, -2 / 3, 0, 1 / 3])
    assert left_out.actor_mask.tolist() == [True, True, False, True]
    zero = grpo(judge_failure="zero").credit(group([1.0, 0.0, np.nan, 1.0]))
    assert zero.advantages.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert zero.actor_mask.all()
    with pytest.raises(ValueError, match=r"algorithm\.judge_failure=skip: use one of zero, leave_out"):
        configure("algorithm.judge_failure=skip")
    for algorithm in ("grpo", "prefix_grpo", "ac2"):
        composed = resolved(compose(["experiment=ac2_paper", f"algorithm={algorithm}", "model.path=m", *FILES]))
        assert composed["algorithm"]["judge_failure"] == "zero"
