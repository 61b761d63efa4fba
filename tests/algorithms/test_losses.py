import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.losses import (
    LOG_RATIO_LIMIT,
    BatchTotals,
    clamped_log_ratio,
    clipped_policy_loss,
    kl_penalty,
    token_weight,
    truncated_importance_weights,
)
from algorithms.policy_update import CHOICES


def surrogate(ratio, advantage, low=0.2, high=0.28, dual=3.0):
    loss = clipped_policy_loss(torch.tensor([ratio]), torch.tensor([float(advantage)]), low, high, dual)
    return loss.loss.item(), loss.clipped.item(), loss.dual_clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "dual"),
    [
        (1.0, 2.0, -2.0, 0, 0),
        (1.5, 2.0, -2.56, 1, 0),  # clipped high: 1.28 x 2
        (0.5, 2.0, -1.0, 0, 0),  # a good action made rarer is never clipped
        (0.5, -1.0, 0.8, 1, 0),  # clipped low: 0.8 x 1
        (1.5, -1.0, 1.5, 0, 0),
        (5.0, -1.0, 3.0, 0, 1),  # dual clip bounds it at 3
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, clipped, dual):
    assert surrogate(ratio, advantage) == pytest.approx((loss, clipped, dual), rel=1e-6)


def test_no_dual_clip():
    assert surrogate(5.0, -1.0, dual=None)[0] == pytest.approx(5.0)


def test_huge_ratios_stay_finite_and_are_counted():
    log_ratio, clamped = clamped_log_ratio(torch.tensor([500.0, 1.0]))
    assert log_ratio.exp().tolist() == pytest.approx([math.exp(LOG_RATIO_LIMIT), math.e], rel=1e-5)
    assert clamped.tolist() == [1.0, 0.0]


def test_kl_estimators_by_hand():
    new, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_penalty(new, ref, "k1").item() == pytest.approx(math.log(2))
    assert kl_penalty(new, ref, "k2").item() == pytest.approx(0.5 * math.log(2) ** 2)
    assert kl_penalty(new, ref, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


def test_k1_and_k3_are_unbiased():
    """Their expectation under the policy is the KL divergence."""
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    true = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        assert (p * kl_penalty(p.log(), q.log(), estimator)).sum().item() == pytest.approx(true.item(), rel=1e-5)


def test_importance_weights_are_truncated_and_reported():
    old, rollout = torch.tensor([0.0, 0.0]), torch.tensor([-1.0, 0.5])
    weight, metrics = truncated_importance_weights(old, rollout, cap=2.0)
    assert weight.tolist() == pytest.approx([2.0, math.exp(-0.5)])
    assert metrics["rollout_corr/rollout_is_mean"].tolist() == pytest.approx([math.e, math.exp(-0.5)])
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"].tolist() == [1.0, 0.0]
    off, _ = truncated_importance_weights(old, rollout, cap=None)
    assert off.tolist() == [1.0, 1.0]


@given(st.sampled_from(CHOICES["loss_aggregation"]), st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(50, 100))
def test_aggregations_match_their_definitions(aggregation, lengths, horizon):
    losses = [torch.arange(1.0, length + 1) for length in lengths]
    totals = BatchTotals(tokens=sum(lengths), sequences=len(lengths))
    weighted = sum(
        (loss * token_weight(aggregation, length, totals, horizon)).sum() for loss, length in zip(losses, lengths, strict=True)
    )
    expected = {
        "token-mean": torch.cat(losses).mean(),
        "seq-mean-token-mean": torch.stack([loss.mean() for loss in losses]).mean(),
        "seq-mean-token-sum-norm": torch.stack([loss.sum() / horizon for loss in losses]).mean(),
    }[aggregation]
    assert float(weighted) == pytest.approx(float(expected), rel=1e-5)
