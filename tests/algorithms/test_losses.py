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
    policy_gradient_loss,
    token_weight,
    truncated_importance_weights,
)
from algorithms.policy_update import CHOICES
from algorithms.types import TokenBatch


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


def test_low_var_kl_is_clamped_and_k3_is_not():
    """A log-ratio of 10: 22,015.5 unclamped; 10 without a gradient as verl has it."""
    ref = torch.tensor([10.0, 1.0])
    for estimator, value, gradient in (("k3", math.exp(10) - 11, 1 - math.exp(10)), ("low_var_kl", 10.0, 0.0)):
        new = torch.zeros(2, requires_grad=True)
        estimate = kl_penalty(new, ref, estimator)
        estimate.sum().backward()
        assert estimate.tolist() == pytest.approx([value, math.e - 2])
        assert new.grad.tolist() == pytest.approx([gradient, 1 - math.e])


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


def batch_of(logprobs, old, advantages, lengths):
    """Tokens of whole sequences, one after the other; the engine agrees with the trainer."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    zeros = torch.zeros(len(sequence))
    return TokenBatch(logprobs, zeros, old, old, old, advantages, zeros, sequence)


NEW = [-1.0, -0.5, -2.0, -0.1, -0.2]
OLD = torch.tensor([-1.1, -0.9, -1.0, -0.15, -0.3])
ADVANTAGES, LENGTHS = torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5]), [2, 3]


def test_gspo_is_its_objective_in_plain_code():
    """`-1/G sum_i min(s_i A_i, clip(s_i) A_i)` with `s_i = (pi(y) / pi_old(y))^(1/|y|)`, value and gradient."""
    new = torch.tensor(NEW, requires_grad=True)
    loss, _ = policy_gradient_loss(batch_of(new, OLD, ADVANTAGES, LENGTHS), 0.2, 0.2, None, None, by_sequence=True)
    totals = BatchTotals(tokens=5, sequences=2)
    weights = torch.cat([torch.full((n,), token_weight("seq-mean-token-mean", n, totals, 10)) for n in LENGTHS])
    mine = (loss * weights).sum()
    mine.backward()
    plain = torch.tensor(NEW, requires_grad=True)
    objective = torch.zeros(())
    for rows, advantage in ((slice(0, 2), 1.0), (slice(2, 5), -0.5)):
        s = (plain[rows].sum() - OLD[rows].sum()).div(len(OLD[rows])).exp()
        objective = objective + torch.minimum(s * advantage, s.clamp(0.8, 1.2) * advantage)
    expected = -objective / 2
    expected.backward()
    assert mine.item() == pytest.approx(expected.item(), rel=1e-6)
    assert new.grad.tolist() == pytest.approx(plain.grad.tolist(), rel=1e-5, abs=1e-8)


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    """`-sg(min(rho, 1 + high)) A log pi`: a token of ratio e^0.4 above the cap of 1.2 still pulls, with weight 1.2."""
    new = torch.tensor(NEW, requires_grad=True)
    loss, logged = policy_gradient_loss(batch_of(new, OLD, ADVANTAGES, LENGTHS), 1.0, 0.2, None, None, cispo=True)
    loss.sum().backward()
    weights = [min(math.exp(n - o), 1.2) for n, o in zip(NEW, OLD.tolist(), strict=True)]
    assert new.grad.tolist() == pytest.approx([-w * a for w, a in zip(weights, ADVANTAGES.tolist(), strict=True)], rel=1e-5)
    assert logged["actor/pg_clipfrac"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
