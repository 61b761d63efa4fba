"""EasyPPO's Tables 1 to 5 as `experiment=TASK algorithm=METHOD` composes them, and AC2's variants at both scales."""

import pytest

from algorithms.value_config import CategoricalConfig
from pipelines.command.entry import combinations
from pipelines.config.compose import CONF, compose, resolved

METHODS = ("ppo", "ppo_actor_filter", "hl_gauss_ppo", "vapo", "easyppo")
TASKS = ("frontiercs", "aime", "search_r1")
FILES = ("model.path=m", "task.train.files=[a]", "task.validation.files=[b]")


def preset(method: str, task: str, *overrides: str) -> dict:
    return resolved(compose([f"experiment={task}", f"algorithm={method}", *FILES, *overrides]))


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
    "algorithm.kl_estimator": "low_var_kl",
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
    assert critic["noise_floor"] == FLOORS[column]  # read by EasyPPO alone
    if method == "hl_gauss_ppo":
        support, bandwidth = BINS[column]
        assert critic["categorical"]["bins"] == 101
        resolved_bins = CategoricalConfig(**critic["categorical"]).resolved(tuple(tree["task"]["reward_range"]))
        assert resolved_bins == (tuple(support), pytest.approx(bandwidth))
    else:
        assert critic["categorical"] is None
    if method != "vapo":
        assert tree["algorithm"]["gae_lambda_policy"] == 1.0
        assert tree["algorithm"]["length_adaptive_alpha"] is None


def test_table_7_is_two_sweeps():
    sizes = combinations(["experiment=frontiercs", "algorithm.critic.minibatches=1,2,4,8,16", "algorithm.critic.scale_lr=true"])
    assert [arguments[1].partition("=")[2] for arguments in sizes] == ["1", "2", "4", "8", "16"]
    both = combinations(["algorithm.critic.minibatches=1,4", "algorithm.critic.noise_normalization=true,false"])
    found = [preset("easyppo", "frontiercs", *arguments)["algorithm"]["critic"] for arguments in both]
    assert [(c["minibatches"], c["noise_normalization"], c["lr"]) for c in found] == [
        (1, True, 2e-6),
        (1, False, 2e-6),
        (4, True, 2e-6),
        (4, False, 2e-6),
    ]


# What each variant of AC2 changes: at the testbed's scale, and at the paper's (section 4.2 and 4.3, Appendix C).
AC2_VARIANTS = {
    "ac2": {"chunk_tokens": (16, 10_000), "replay.cut_grid": (16, 10_000), "max_new_tokens": (104, 50_000)},
    "ac2_short_chunks": {"chunk_tokens": (4, 2_000), "replay.cut_grid": (4, 2_000), "max_new_tokens": (104, 50_000)},
    "ac2_stale": {"replay.refill_problems": (160, 1_920), "replay.capacity": (160, 1_920), "replay.refill_every": (10, 10)},
    "ac2_long_responses": {"max_new_tokens": (156, 75_000), "chunk_tokens": (16, 10_000)},
    "ac2_no_audit": {"audit_fraction": (0.0, 0.0), "grouped": (True, True)},
    "ac2_no_group": {"audit_fraction": (0.0, 0.0), "grouped": (False, False), "problems_per_step": (32, 192)},
    "ac2_no_local_readiness": {"grouped": (False, False), "readiness.local": (False, False)},
    "ac2_no_reference": {"self_critic.references": (False, False)},
    "ac2_correct_only": {"replay.least_reward": (0.857142, 0.857142), "replay.capacity": (64, 256)},
    "ac2_noise_normalized": {"self_critic.noise_normalization": (True, True), "self_critic.pairs_per_update": (128, 768)},
}


def test_every_variant_of_ac2_is_listed_here():
    assert {file.stem for file in (CONF / "algorithm").glob("ac2*.yaml")} == set(AC2_VARIANTS)


@pytest.mark.parametrize("variant", AC2_VARIANTS)
def test_variants_of_ac2_are_the_same_change_at_both_scales(variant: str):
    small = resolved(compose([f"algorithm={variant}"]))
    paper = resolved(compose(["experiment=ac2_paper", f"algorithm={variant}", *FILES]))
    for key, values in AC2_VARIANTS[variant].items():
        assert (at(small["algorithm"], key), at(paper["algorithm"], key)) == values, key
    assert paper["task"]["max_new_tokens"] == 50_000  # evaluation's, whatever the training's
    assert (paper["algorithm"]["name"], paper["algorithm"]["group_size"]) == (variant, 16)
    assert paper["algorithm"]["importance_cap"] is None


def test_the_baselines_of_ac2_have_no_importance_cap_either():
    for name in ("grpo", "prefix_grpo"):
        assert resolved(compose(["experiment=ac2_paper", f"algorithm={name}", *FILES]))["algorithm"]["importance_cap"] is None
