"""What an evaluation says, and what a step's groups say of its problems."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.rollout.metrics import _group_fractions, nothing_learnt
from pipelines.rollout.scores import evaluation_metrics, mean_score, pass_at
from pipelines.store.outbox import metric_key


def row(*rewards, source="a"):
    return {"data_source": source, "n": len(rewards), "reward": list(rewards), "acc": list(rewards)}


def test_pass_at_k_of_one_right_response_in_four():
    metrics = evaluation_metrics([row(1.0, 0.0, 0.0, 0.0)], 4)
    assert metrics["val-core/a/acc/pass@4"] == 1.0
    assert metrics["val-core/a/acc/pass@2"] == 0.5
    assert metrics["val-core/a/acc/best@4/mean"] == pytest.approx(1 - 0.75**4, abs=0.05)  # with replacement: 0.684


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(case):
    n, right, k = case
    draws = list(itertools.combinations([1] * right + [0] * (n - right), k))
    assert pass_at(n, right, k) == pytest.approx(np.mean([max(draw) for draw in draws]))


def test_pass_at_k_needs_right_or_wrong_and_enough_scores():
    assert "val-core/a/acc/pass@2" not in evaluation_metrics([row(0.5, 1.0)], 2)
    metrics = evaluation_metrics([row(1.0, None), row(0.0, 1.0)], 2)
    assert metrics["val-core/a/acc/pass@2"] == 1.0  # of the second problem alone
    assert metrics["val-aux/a/missing"] == 1.0


def test_accuracy_is_the_verdict_and_not_the_reward():
    """Rewards of -1 and 1 for two wrong and two right ones: accuracy 0.5 and reward 0; pass@2 is 1 - 1/6."""
    metrics = evaluation_metrics([row(1.0, -1.0, 1.0, -1.0) | {"acc": [1.0, 0.0, 1.0, 0.0]}], 4)
    assert metrics["val-core/a/acc/mean@4"] == mean_score(metrics, 4) == 0.5
    assert metrics["val-aux/a/reward/mean@4"] == 0.0
    assert metrics["val-core/a/acc/pass@2"] == pytest.approx(5 / 6)


def test_sources_count_equally_however_many_problems_they_have():
    rows = [row(1.0, 1.0, source="a"), *[row(0.0, 0.0, source="b")] * 9, row(None, None, source="c")]
    metrics = evaluation_metrics(rows, 2)
    assert mean_score(metrics, 2) == metrics["val-core/mean/acc/mean@2"] == 0.5
    assert metrics["val-core/mean/acc/pass@2"] == 0.5
    mixed = evaluation_metrics([row(1.0, 1.0, source="a"), row(0.5, 0.5, source="b")], 2)
    assert mixed["val-core/mean/acc/mean@2"] == 0.75
    assert "val-core/mean/acc/pass@2" not in mixed  # one source has none
    assert math.isnan(mean_score(evaluation_metrics([row(None, source="c")], 1), 1))


def group(*rewards, values=None):
    owned = [value is not None for value in values or [None] * len(rewards)]
    return {"reward": list(rewards), "endpoint_value": list(values or rewards), "self_scored": owned}


def test_groups_without_spread_and_those_that_are_solved_or_not():
    rows = [group(1.0, 1.0), group(0.0, 0.0), group(0.5, 0.5), group(1.0, 0.0), group(None, None, values=[1.0, 1.0])]
    fractions = _group_fractions(rows, (0.0, 1.0))
    assert fractions == {"reward/frac_reward_zero_std": 0.8, "reward/frac_solved": 0.4, "reward/frac_unsolved": 0.2}
    signed = _group_fractions([group(-1.0, -1.0), group(1.0, 1.0), group(0.0, 0.0)], (-1.0, 1.0))
    assert signed["reward/frac_solved"] == signed["reward/frac_unsolved"] == pytest.approx(1 / 3)
    assert _group_fractions([group(None, None)], (0.0, 1.0))["reward/frac_solved"] == 0.0


def test_a_step_that_kept_no_group_says_that_rewards_were_equal():
    step = {"training/global_step": 3.0, "training/groups": 8.0, "actor/empty_minibatches": 1.0}
    step |= {"reward/frac_solved": 0.25, "reward/frac_unsolved": 0.75}
    (warning,) = nothing_learnt(step | {"training/filter_groups/dropped": 8.0})
    assert "step 3: dynamic sampling kept none of 8 groups" in warning
    assert "equal (25% solved, 75% unsolved)" in warning
    assert "truncated" not in warning
    (warning,) = nothing_learnt(step | {"training/filter_groups/dropped": 2.0})
    assert "all truncated and filtered" in warning
    assert not nothing_learnt({})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("val-core/math//acc/mean@4", "val-core/math/_/acc/mean_at_4"),
        ("val-core/openai/gsm8k/acc/pass@2", "val-core/openai/gsm8k/acc/pass_at_2"),
        ("val-core/../acc", "val-core/__/acc"),
        ("/x/", "_/x/_"),
        ("val-core/naïve:1?/acc", "val-core/na_ve_1_/acc"),
    ],
)
def test_names_are_safe_for_mlflow(name, key):
    assert metric_key(name) == key


@given(st.text(min_size=1, max_size=400))
def test_mlflow_takes_any_name_made_safe(name):
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(metric_key(name))
