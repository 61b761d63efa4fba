"""EasyPPO's Tables 1 to 5, number for number, as `experiment=METHOD_TASK` composes them."""

import pytest

from pipelines.command.entry import combinations, resolved
from pipelines.config.run import compose

METHODS = ("ppo", "ppo_actor_filter", "hl_gauss_ppo", "vapo", "easyppo")
TASKS = ("frontiercs", "aime", "search_r1")
FILES = ("model.path=m", "task.train.files=[a]", "task.validation.files=[b]")


def preset(method: str, task: str, *overrides: str) -> dict:
    return resolved(compose([f"experiment={method}_{task}", *FILES, *overrides]))


TABLE_1 = {  # FrontierCS, AIME, Search-R1
    "algorithm.problems_per_step": (16, 32, 64),
    "algorithm.group_size": (32, 16, 16),
    "task.max_prompt_tokens": (8192, 2048, 4096),
    "algorithm.max_new_tokens": (32768, 8192, 4096),
    "sampling.temperature": (1.0, 1.0, 1.0),
    "sampling.top_p": (1.0, 1.0, 1.0),
    "optimizer.lr": (1e-6, 1e-6, 1e-6),
    "algorithm.critic.lr": (2e-6, 2e-6, 2e-6),
    "algorithm.minibatches": (1, 1, 1),
    "algorithm.critic.epochs": (1, 1, 1),
    "optimizer.warmup_steps": (0, 20, 0),
    "algorithm.critic.lr_warmup_steps": (0, 20, 0),
    "algorithm.critic.warmup_steps": (30, 30, 30),
    "evaluation.n": (5, 32, 1),
    "evaluation.temperature": (1.0, 1.0, 0.0),
    "evaluation.top_p": (1.0, 0.7, 1.0),
    "optimizer.schedule": ("constant", "constant", "constant"),
}
TABLE_2 = {
    "algorithm.gamma": 1.0,
    "algorithm.gae_lambda_value": 1.0,
    "algorithm.clip_low": 0.2,
    "algorithm.dual_clip": 3.0,
    "algorithm.critic.value_clip": 0.2,
    "optimizer.clip_grad_norm": 1.0,
    "algorithm.critic.clip_grad_norm": 1.0,
    "algorithm.epochs": 1,
    "algorithm.entropy_coef": 0.0,
    "algorithm.kl_coef": 1e-3,
    "algorithm.kl_estimator": "k3",
    "algorithm.kl_in_reward": 0.0,
    "algorithm.loss_aggregation": "token-mean",
    "optimizer.betas": [0.9, 0.999],
    "algorithm.critic.betas": [0.9, 0.999],
    "optimizer.weight_decay": 0.01,
    "algorithm.critic.weight_decay": 0.01,
    "optimizer.eps": 1e-8,
    "algorithm.critic.eps": 1e-8,
    "algorithm.positive_nll_coef": 0.0,
}
TABLE_3 = {  # noise normalisation, overlong filtering, K
    "ppo": (False, "none", 1),
    "ppo_actor_filter": (False, "actor_only", 1),
    "hl_gauss_ppo": (False, "none", 1),
    "vapo": (False, "none", 1),
    "easyppo": (True, "actor_only", 4),
}
FLOORS = (0.075, 0.25, 0.125)
BINS = (([-0.1, 1.1], 0.009), ([-1.1, 1.1], 0.0165), ([-0.1, 1.1], 0.009))


def at(tree: dict, key: str):
    for part in key.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_presets_carry_the_tables(method: str, task: str):
    tree, column = preset(method, task), TASKS.index(task)
    for key, values in TABLE_1.items():
        assert at(tree, key) == values[column], key
    for key, value in TABLE_2.items():
        assert at(tree, key) == value, key
    assert tree["algorithm"]["clip_high"] == (0.2, 0.28, 0.28 if method == "vapo" else 0.2)[column]
    critic = tree["algorithm"]["critic"]
    assert (critic["noise_normalization"], tree["algorithm"]["overlong_filter"], critic["minibatches"]) == TABLE_3[method]
    assert critic["noise_floor"] == (FLOORS[column] if method == "easyppo" else None)
    if method == "hl_gauss_ppo":
        support, bandwidth = BINS[column]
        assert critic["categorical"] == {"bins": 101, "support": support, "bandwidth": bandwidth}
    else:
        assert critic["categorical"] is None
    if method != "vapo":
        assert tree["algorithm"]["gae_lambda_policy"] == 1.0
        assert tree["algorithm"]["length_adaptive_alpha"] is None


def test_table_7_is_two_sweeps():
    sizes = combinations(
        ["experiment=easyppo_frontiercs", "algorithm.critic.minibatches=1,2,4,8,16", "algorithm.critic.scale_lr=true"]
    )
    assert [arguments[1].partition("=")[2] for arguments in sizes] == ["1", "2", "4", "8", "16"]
    both = combinations(["algorithm.critic.minibatches=1,4", "algorithm.critic.noise_normalization=true,false"])
    found = [preset("easyppo", "frontiercs", *arguments)["algorithm"]["critic"] for arguments in both]
    assert [(c["minibatches"], c["noise_normalization"], c["lr"]) for c in found] == [
        (1, True, 2e-6),
        (1, False, 2e-6),
        (4, True, 2e-6),
        (4, False, 2e-6),
    ]
