"""PPO's pure parts: estimates against brute force, weights by hand, masks, and what filtering makes of the critic's target."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.advantages import gae, length_adaptive_lambdas
from algorithms.noise import inequality, noise_floor, noise_weights, return_std
from algorithms.ppo import PPO
from algorithms.types import Group, Sample, Step
from algorithms.value_config import CategoricalConfig
from algorithms.value_heads import HLGauss, ScalarHead
from tests.conftest import configure
from tests.reference.ppo import brute_force_gae

floats = st.floats(-2, 2)


@given(st.lists(st.lists(st.tuples(floats, floats), min_size=1, max_size=12), min_size=1, max_size=4), st.data())
def test_gae_is_its_sum(responses, data):
    gamma = data.draw(st.floats(0, 1))
    lambdas = np.array([data.draw(st.floats(0, 1)) for _ in responses])
    rewards = [np.array([reward for reward, _ in response]) for response in responses]
    values = [np.array([value for _, value in response]) for response in responses]
    for i, found in enumerate(gae(rewards, values, gamma, lambdas)):
        np.testing.assert_allclose(found, brute_force_gae(rewards[i], values[i], gamma, lambdas[i]), atol=1e-9)


def test_gae_by_hand():
    """One reward at the end: with lambda 1 the return less the value, with lambda 0 the next value less this one."""
    rewards, values = [np.array([0.0, 0.0, 1.0])], [np.array([0.2, 0.5, 0.6])]
    np.testing.assert_allclose(gae(rewards, values, 1.0, np.ones(1))[0], [0.8, 0.5, 0.4])
    np.testing.assert_allclose(gae(rewards, values, 1.0, np.zeros(1))[0], [0.3, 0.1, 0.4])
    assert gae([], [], 1.0, np.ones(0)) == []


def test_length_adaptive_lambda():
    np.testing.assert_allclose(length_adaptive_lambdas(np.array([10, 40, 1000]), 0.05), [0.0, 0.5, 0.98])


# -- noise normalisation ---------------------------------------------------------------------------------------------------


def test_weights_of_the_papers_example():
    stds = np.array([return_std(np.array([0.0, 1.0])), return_std(np.array([0.5, 0.5]))])
    np.testing.assert_allclose(noise_weights(stds, 0.25), [2 / 3, 4 / 3])


def test_floors_of_table_4():
    assert noise_floor((-1, 1), 16) == 0.25
    assert noise_floor((0, 1), 16) == 0.125


def test_a_flat_group_weighs_about_twice_one_with_a_single_other_reward():
    for n in (8, 16, 32):
        flat, single = noise_weights(np.array([0.0, return_std(np.eye(n)[0])]), noise_floor((0, 1), n))
        assert flat / single == pytest.approx(2 * math.sqrt(1 - 1 / n))


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=20), st.floats(0.01, 1))
def test_weights_have_mean_one_and_fall_with_the_spread(stds, floor):
    array = np.array([np.nan if std is None else std for std in stds], float)
    weights = noise_weights(array, floor)
    assert weights.mean() == pytest.approx(1)
    assert (weights[np.isnan(array)] == 1).all()
    known = [(std, weight) for std, weight in zip(stds, weights, strict=True) if std is not None]
    for std, weight in known:
        assert all(weight >= other - 1e-12 for larger, other in known if larger >= std)


def test_the_spread_leaves_out_missing_rewards_and_needs_two():
    assert return_std(np.array([0.0, np.nan, 1.0])) == 0.5
    assert return_std(np.array([np.nan, 1.0])) is None


def test_share_of_the_top_prompts():
    assert inequality(np.array([0.5] * 18 + [5.5] * 2)) == pytest.approx((1.0, 5.5, 11 / 20))


# -- heads -----------------------------------------------------------------------------------------------------------------

HEAD = HLGauss(21, (-0.5, 1.5), 0.08)


def test_hl_gauss_target_is_the_integral_over_each_bin():
    centres, width = np.linspace(-0.5, 1.5, 21), 0.1
    for value in (-0.4, 0.0, 0.37, 1.0, 1.49):
        points = [np.linspace(c - width / 2, c + width / 2, 2001) for c in centres]
        mass = np.array([np.trapezoid(np.exp(-(((x - value) / 0.08) ** 2) / 2), x) for x in points])
        found = HEAD.target(torch.tensor([value]))[0]
        np.testing.assert_allclose(found.numpy(), mass / mass.sum(), atol=1e-6)


def test_hl_gauss_values_are_expectations_and_the_best_outputs_say_the_return():
    outputs = torch.zeros(1, 21)
    assert HEAD.values(outputs)[0] == pytest.approx(0.5)
    best = HEAD.target(torch.tensor([0.37])).log()
    assert HEAD.values(best)[0] == pytest.approx(0.37, abs=1e-3)


def test_table_5s_bins_follow_from_the_range_of_rewards():
    bins = CategoricalConfig(101, None, None)
    assert bins.resolved((0.0, 1.0)) == ((-0.1, 1.1), pytest.approx(0.009))
    assert bins.resolved((-1.0, 1.0)) == ((-1.1, 1.1), pytest.approx(0.0165))
    head = configure("algorithm=hl_gauss_ppo", "task=graded_chain", "task.reward_range=[-1.0,1.0]").algorithm.head
    assert HLGauss(101, (-1.1, 1.1), 0.0165).target(torch.tensor([0.3])).allclose(head.target(torch.tensor([0.3])))
    assert CategoricalConfig(21, (-0.5, 1.5), 0.08).resolved(None) == ((-0.5, 1.5), 0.08)
    with pytest.raises(ValueError, match=r"needs task.reward_range=\[low,high\]"):
        bins.resolved(None)


def test_a_return_outside_the_bins_is_refused_with_the_range_seen():
    with pytest.raises(ValueError, match=r"does not cover returns from 0.2 to 3: widen it"):
        HEAD.loss(torch.zeros(2, 21), torch.zeros(2), torch.tensor([0.2, 3.0]))


def test_clipped_value_loss_by_hand():
    """Moved from 0.5 to 0.9 with a return of 1: the clipped value 0.7 is further off and counts, without a gradient."""
    outputs = torch.tensor([[0.9], [0.6]], requires_grad=True)
    loss, logged = ScalarHead(0.2).loss(outputs, torch.tensor([0.5, 0.5]), torch.ones(2))
    np.testing.assert_allclose(loss.detach().numpy(), [0.045, 0.08], rtol=1e-5)
    loss.sum().backward()
    np.testing.assert_allclose(outputs.grad[:, 0].numpy(), [0.0, -0.4], rtol=1e-5)
    assert logged["critic/vf_clipfrac"].tolist() == [1.0, 0.0]


# -- overlong filtering ----------------------------------------------------------------------------------------------------


def ppo(*overrides: str) -> PPO:
    algorithm = configure("algorithm=ppo", "task=graded_chain", *overrides).algorithm
    assert isinstance(algorithm, PPO)
    return algorithm


def bandit_group(rewards: list[float], truncated: list[bool]) -> Group:
    n = len(rewards)
    return Group(np.array(rewards), np.array(truncated), np.full(n, np.nan), np.zeros(n, bool))


def test_masks_of_the_three_filters():
    group = bandit_group([1.0, 0.0, math.nan, 0.5], [False, True, False, False])
    masks = {
        name: (credit.actor_mask.tolist(), credit.value_mask.tolist())
        for name in ("none", "both", "actor_only")
        for credit in [ppo(f"algorithm.overlong_filter={name}").credit(group)]
    }
    judged, completed = [True, True, False, True], [True, False, False, True]
    assert masks == {"none": (judged, judged), "both": (completed, completed), "actor_only": (completed, judged)}
    assert ppo().credit(group).return_std == pytest.approx(np.std([1.0, 0.0, 0.5]))


def test_joint_filtering_makes_the_critic_conditional_and_actor_only_does_not():
    """A bandit of one state: completed with 0.6 for a mean reward of 0.75, else truncated for 0.1. E[R|C] = 0.75, E[R] = 0.49."""
    rng = np.random.default_rng(0)
    truncated = rng.random(4000) < 0.4
    rewards = np.where(truncated, 0.1, rng.choice([0.5, 1.0], 4000))
    fitted = {}
    for name in ("both", "actor_only", "none"):
        credit = ppo(f"algorithm.overlong_filter={name}").credit(bandit_group(rewards.tolist(), truncated.tolist()))
        value = torch.zeros(1, 1, requires_grad=True)
        returns = torch.tensor(rewards[credit.value_mask], dtype=torch.float32)
        for _ in range(200):
            loss, _ = ScalarHead(None).loss(value.expand(len(returns), 1), torch.zeros(len(returns)), returns)
            (gradient,) = torch.autograd.grad(loss.mean(), value)
            with torch.no_grad():
                value -= 0.1 * gradient
        fitted[name] = value.item()
    assert fitted["both"] == pytest.approx(0.75, abs=0.02)
    assert fitted["actor_only"] == fitted["none"] == pytest.approx(0.49, abs=0.02)


# -- settings --------------------------------------------------------------------------------------------------------------


def test_easyppo_is_ppo_and_three_settings():
    plain, easy = ppo(), configure("algorithm=easyppo", "task=graded_chain").algorithm
    different = {name for name in vars(plain) if getattr(plain, name) != getattr(easy, name)}
    different |= {f"critic.{name}" for name in vars(plain.critic) if getattr(plain.critic, name) != getattr(easy.critic, name)}
    assert different - {"critic", "name"} == {"overlong_filter", "critic.noise_normalization", "critic.minibatches"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.critic.minibatches=3"], r"algorithm.critic.minibatches=3 does not divide the 32 x 8 continuations"),
        (["algorithm.critic.noise_normalization=true", "algorithm.group_size=1"], r"needs the spread of a prompt's returns"),
        (
            ["algorithm.critic.noise_normalization=true", "algorithm.reward_range=null"],
            r"give algorithm.critic.noise_floor, or task",
        ),
        (["algorithm.critic.noise_normalization=true", "algorithm.critic.noise_floor=0"], r"noise_floor=0: must be above 0"),
        (
            ["algorithm.critic.categorical={bins:11,support:[0.2,0.8],bandwidth:0.1}"],
            r"does not cover task.reward_range=\[0.0, 1.0\]",
        ),
        (["algorithm.critic.categorical={bins:1,support:[0,1],bandwidth:0.1}"], r"categorical.bins=1: must be at least 2"),
        (["algorithm.overlong_filter=critic"], r"use one of none, both, actor_only"),
        (["algorithm.gae_lambda_policy=1.5"], r"gae_lambda_policy=1.5: must be at most 1"),
        (["algorithm.length_adaptive_alpha=0"], r"length_adaptive_alpha=0: must be above 0"),
        (["algorithm.critic.path=/nowhere"], r"no config.json there"),
    ],
)
def test_impossible_settings_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        ppo(*overrides)


def test_the_critics_rate_scales_with_its_minibatches_as_in_table_7():
    class Steps:
        def __init__(self):
            self.rates = []

        def warmed(self, optimizer):
            return 0

        def minibatches(self, batch, count, balanced):
            return [[]] * count

        def step(self, optimizer, samples, loss, *, lr):
            assert optimizer == "value"
            self.rates.append(lr)
            return Step(tokens=1)

    for k, rate in ((1, 4e-6), (2, 2 * math.sqrt(2) * 1e-6), (4, 2e-6), (8, math.sqrt(2) * 1e-6), (16, 1e-6)):
        learner = Steps()
        algorithm = ppo(f"algorithm.critic.minibatches={k}", "algorithm.critic.scale_lr=true", "algorithm.critic.lr=2e-6")
        algorithm.improve_critic(learner, [])
        assert learner.rates == [pytest.approx(rate)] * k


def test_the_penalty_in_the_reward_is_the_log_ratio_at_each_token():
    sample = Sample(0, np.arange(5), 2, np.zeros(3, np.float32), 0.0, reward=1.0)
    sample.old_logprobs, sample.ref_logprobs = np.array([-1.0, -2.0, -3.0]), np.array([-2.0, -2.0, -2.0])
    np.testing.assert_allclose(ppo("algorithm.kl_in_reward=0.1").token_rewards(sample), [-0.1, 0.0, 1.1])
    np.testing.assert_allclose(ppo().token_rewards(sample), [0.0, 0.0, 1.0])
