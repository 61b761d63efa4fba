"""PPO's update on sharded models: the plain reference's numbers, on any number of ranks and any split."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from algorithms.ppo import PPO
from pipelines.trainer import state as train_state
from pipelines.trainer.policy import full_state_dict, gathered
from pipelines.trainer.value_folder import HEAD, ValueModelError, check_value_model
from tests.conftest import configure
from tests.distributed import run_ranks
from tests.learner_parts import TEMPERATURE, credited, make_groups, make_learner, share
from tests.reference.ppo import ppo_update

pytestmark = pytest.mark.slow

BINS = "algorithm.critic.categorical={bins:21,support:[-0.5,1.5],bandwidth:0.08}"
VARIANTS = {
    "ppo": ("algorithm=ppo", "algorithm.kl_coef=0.1"),
    "easyppo": ("algorithm=easyppo", "algorithm.critic.minibatches=3", "algorithm.gamma=0.99", "algorithm.gae_lambda_value=0.9"),
    "hl_gauss": ("algorithm=hl_gauss_ppo", BINS),
    "vapo": ("algorithm=vapo", "algorithm.positive_nll_coef=0.1", "algorithm.kl_in_reward=0.05", "algorithm.gae_lambda_value=0.95"),
    # Several steps from the same old values and probabilities, within bounds so narrow that every clip binds; the rate warms up.
    "bounded": (
        *("algorithm=ppo", "algorithm.minibatches=2", "algorithm.epochs=2", "algorithm.critic.minibatches=2"),
        *("algorithm.critic.epochs=2", "algorithm.critic.lr_warmup_steps=3", "algorithm.critic.value_clip=0.002"),
        *("algorithm.clip_low=0.002", "algorithm.clip_high=0.002", "algorithm.dual_clip=1.001"),
    ),
    "both": ("algorithm=ppo", "algorithm.overlong_filter=both", "algorithm.gae_lambda_policy=0.9"),
}


def algorithm_of(variant: str) -> PPO:
    """The variant without warm-up, on six problems; AdamW's epsilon is large so that it does not divide rounding errors."""
    sizes = ("algorithm.problems_per_step=6", "algorithm.group_size=4", "algorithm.critic.warmup_steps=0")
    fields = ("algorithm.critic.lr=1e-3", "algorithm.critic.eps=1e-3")
    algorithm = configure("task=graded_chain", *VARIANTS[variant], *sizes, *fields).algorithm
    assert isinstance(algorithm, PPO)
    return algorithm


def truncated_groups() -> list[dict]:
    """The groups with fractional rewards, and some responses cut off."""
    rng = np.random.default_rng(8)
    groups = []
    for i, group in enumerate(make_groups()):
        reasons = ["length" if rng.random() < 0.3 else "stop" for _ in range(4)]
        rewards = [None if r is None else round(float(rng.random()) * (i % 3) / 2, 2) for r in group["reward"]]
        groups.append(group | {"truncated": [reason == "length" for reason in reasons], "reward": rewards})
    return groups


def value_folder(path: Path, model: str, outputs: int) -> str:
    """A critic whose head is not zero, so that its backbone learns from the first step."""
    path.mkdir()
    AutoModel.from_pretrained(model).save_pretrained(path)
    for file in Path(model).glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(1)
    size = json.loads((path / "config.json").read_text())["hidden_size"]
    head = {"weight": 0.1 * torch.randn(outputs, size, generator=generator), "bias": torch.full((outputs,), 0.3)}
    save_file(head, str(path / HEAD))
    return str(path)


def learner_of(folders: dict[str, str], algorithm: PPO, begins_as: str = "scalar", max_tokens: int = 4096, **fields):
    """A learner with all that the algorithm asks for, its value model from one of the folders."""
    value_model = dataclasses.replace(algorithm.value_model, path=folders[begins_as])
    asked = {"value_model": value_model, "optimizers": algorithm.optimizers, "credit_type": algorithm.credit_type}
    return make_learner(folders["policy"], max_tokens, reference_path=folders["reference"], **asked, **fields)


def updated(folders: dict[str, str], variant: str, max_tokens: int = 4096, offload_idle: bool = False) -> dict:
    """Metrics and weights after one update on this rank's share of the groups."""
    algorithm = algorithm_of(variant)
    learner = learner_of(folders, algorithm, "bins" if variant == "hl_gauss" else "scalar", max_tokens, offload_idle=offload_idle)
    metrics = algorithm.update(learner, share(credited(truncated_groups(), algorithm)))
    if offload_idle:
        assert learner.residency.resident == {"policy", "actor"}
        learner.use_all()
    critic = {name: gathered(value).clone() for name, value in learner.models["value"].state_dict().items()}
    return {"metrics": metrics, "weights": full_state_dict(learner.policy, torch.float32), "critic": critic}


def second_update(folders: dict[str, str], path: str) -> dict:
    """Weights after a warm-up step and a whole one: two ranks leave a checkpoint between them, one rank goes on from it."""
    algorithm = dataclasses.replace(
        algorithm_of("easyppo"), critic=dataclasses.replace(algorithm_of("easyppo").critic, warmup_steps=1)
    )
    learner = learner_of(folders, algorithm)
    groups = credited(truncated_groups(), algorithm)
    before = full_state_dict(learner.policy, torch.float32)
    results: dict = {}
    if dist.get_world_size() == 2:
        results["warmup"] = algorithm.update(learner, share(groups))
        after = full_state_dict(learner.policy, torch.float32)
        results["unmoved"] = all(torch.equal(before[name], after[name]) for name in before)
        train_state.save(learner, Path(path), {"step": 1}, {"step": 1})
    else:
        train_state.load(learner, path)
        assert (learner.batches, learner.updates) == (1, {"actor": 0, "value": 3})
    results["metrics"] = algorithm.update(learner, share(groups))
    results["weights"] = full_state_dict(learner.policy, torch.float32)
    return results


def masked_update(folders: dict[str, str], **group_fields) -> dict:
    """An update in which no response has a part in the actor's loss, or none in any."""
    algorithm = algorithm_of("easyppo")
    groups = credited([group | {name: [value] * 4 for name, value in group_fields.items()} for group in make_groups()], algorithm)
    learner = learner_of(folders, algorithm)
    return algorithm.update(learner, share(groups))


def everything(folders: dict[str, str], path: str) -> dict:
    """All that the tests below compare, in one set of processes: starting them is what takes the time."""
    results = {variant: updated(folders, variant) for variant in VARIANTS}
    results["small"] = updated(folders, "easyppo", max_tokens=64)
    results["offloaded"] = updated(folders, "easyppo", offload_idle=True)
    results["second"] = second_update(folders, path)
    results["all_truncated"] = masked_update(folders, truncated=True)
    results["none_judged"] = masked_update(folders, reward=None)
    return results


@pytest.fixture(scope="module")
def folders(random_model: str, tmp_path_factory) -> dict[str, str]:
    from pipelines.data.tiny_model import build_model, build_tokenizer

    base = tmp_path_factory.mktemp("critics")
    build_model(seed=4).save_pretrained(base / "reference")
    build_tokenizer().save_pretrained(base / "reference")
    critics = {name: value_folder(base / name, random_model, size) for name, size in (("scalar", 1), ("bins", 21))}
    return {"policy": random_model, "reference": str(base / "reference"), **critics}


@pytest.fixture(scope="module")
def results(folders, tmp_path_factory) -> dict:
    path = str(tmp_path_factory.mktemp("checkpoints") / "step_000001")
    return {ranks: run_ranks(everything, ranks, folders, path)[0] for ranks in (2, 1)} | {"path": path}


def reference(folders: dict[str, str], variant: str) -> tuple[dict, dict, dict]:
    """What the plain file gets: its numbers, the policy's weights, the critic's."""
    algorithm = algorithm_of(variant)
    critic_path = folders["bins" if variant == "hl_gauss" else "scalar"]
    policy = AutoModelForCausalLM.from_pretrained(folders["policy"], dtype=torch.float32)
    frozen = AutoModelForCausalLM.from_pretrained(folders["reference"], dtype=torch.float32)
    backbone = AutoModel.from_pretrained(critic_path, dtype=torch.float32)
    outputs = 21 if variant == "hl_gauss" else 1
    head = nn.Linear(backbone.config.hidden_size, outputs)
    head.load_state_dict(load_file(str(Path(critic_path) / HEAD)))
    actor = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.01)
    critic = torch.optim.AdamW(
        [*backbone.parameters(), *head.parameters()], lr=1e-3, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.01
    )
    groups = [
        {
            "prompt": group["prompt_ids"] + group["prefix_ids"],
            "responses": group["response_ids"],
            "rollout_logprobs": group["rollout_logprobs"],
            "rewards": group["reward"],
            "truncated": group["truncated"],
        }
        for group in truncated_groups()
    ]
    alpha = algorithm.length_adaptive_alpha
    numbers = ppo_update(
        policy,
        frozen,
        backbone,
        head,
        actor,
        critic,
        groups,
        temperature=TEMPERATURE,
        gamma=algorithm.gamma,
        lambda_policy=lambda T: algorithm.gae_lambda_policy if alpha is None else max(0.0, 1 - 1 / (alpha * T)),
        lambda_value=algorithm.gae_lambda_value,
        overlong_filter=algorithm.overlong_filter,
        noise_floor=algorithm.critic.floor(algorithm.reward_range, 4) if algorithm.critic.noise_normalization else None,
        critic_minibatches=algorithm.critic.minibatches,
        critic_epochs=algorithm.critic.epochs,
        critic_lr_warmup=algorithm.critic.lr_warmup_steps,
        value_clip=algorithm.critic.value_clip,
        bins=(torch.linspace(-0.5, 1.5, 21), 0.08) if variant == "hl_gauss" else None,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        tis_cap=2.0,
        kl_coef=algorithm.kl_coef,
        kl_in_reward=algorithm.kl_in_reward,
        positive_nll=algorithm.positive_nll_coef,
        max_grad_norm=1.0,
        actor_minibatches=algorithm.minibatches,
        actor_epochs=algorithm.epochs,
    )
    parts = {f"backbone.{k}": v for k, v in backbone.state_dict().items()} | {f"head.{k}": v for k, v in head.state_dict().items()}
    return numbers, policy.state_dict(), parts


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_is_the_plain_references(folders, results, variant: str):
    numbers, policy, critic = reference(folders, variant)
    own = results[1][variant]
    if variant != "easyppo":
        del numbers["critic/noise_weight/max"]
    if variant == "hl_gauss":
        del numbers["critic/vf_clipfrac"]  # a categorical head has no clip
    if variant == "bounded":
        assert min(numbers[f"{name}"] for name in ("critic/vf_clipfrac", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")) > 0.01
    for name, value in numbers.items():
        assert own["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for name, value in own["weights"].items():
        torch.testing.assert_close(value, policy[name], rtol=0, atol=1e-6)
    for name, value in own["critic"].items():
        torch.testing.assert_close(value, critic[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", [*VARIANTS, "small", "offloaded"])
def test_two_ranks_and_any_split_give_the_same(results, variant: str):
    """Rank 1 has one group of six: the weights' mean of one is over the whole batch, not over a rank."""
    one, two = results[1][variant if variant in VARIANTS else "easyppo"], results[2][variant]
    for name, value in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for part in ("weights", "critic"):
        for name, value in one[part].items():
            torch.testing.assert_close(two[part][name], value, rtol=0, atol=1e-5)


def test_only_the_critic_learns_in_its_warm_up_and_a_checkpoint_goes_on(results):
    two, one = results[2]["second"], results[1]["second"]
    assert two["unmoved"]
    assert two["warmup"]["critic/warmup"] == 1.0
    assert "actor/pg_loss" not in two["warmup"]
    assert one["metrics"]["critic/vf_loss"] == pytest.approx(two["metrics"]["critic/vf_loss"], rel=1e-5)
    for name, value in two["weights"].items():
        torch.testing.assert_close(one["weights"][name], value, rtol=0, atol=1e-6)


def test_the_checkpoints_critic_can_begin_another_run(results, folders):
    folder = f"{results['path']}/critic"
    check_value_model(folder, 1, folders["policy"])
    with pytest.raises(ValueModelError, match=r"its head has 1 outputs and this run's has 101"):
        check_value_model(folder, 101, folders["policy"])
    AutoModel.from_pretrained(folder)


def test_an_update_without_a_completed_response_skips_the_actor_and_teaches_the_critic(results):
    metrics = results[2]["all_truncated"]
    assert metrics["actor/empty_minibatches"] == 1.0
    assert metrics["critic/vf_loss"] > 0


def test_an_update_without_any_reward_moves_nothing(results):
    metrics = results[2]["none_judged"]
    assert metrics["actor/empty_minibatches"] == metrics["critic/empty_minibatches"] == 1.0


def new_heads(folders: dict[str, str], seeds: list[int | None]) -> list[torch.Tensor]:
    """The whole weights of a new head by seed."""
    algorithm, found = algorithm_of(next(iter(VARIANTS))), []
    for seed in seeds:
        value_model = dataclasses.replace(algorithm.value_model, path=None, head_seed=seed)
        learner = make_learner(folders["policy"], 4096, value_model=value_model, optimizers=algorithm.optimizers)
        found.append(gathered(learner.models["value"].head.weight).clone())
    return found


def test_a_new_head_is_of_zeros_or_drawn_from_its_seed(folders):
    zeros, one, again, other = run_ranks(new_heads, 2, folders, [None, 1, 1, 2])[0]
    assert not zeros.any()
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert float(one.std()) == pytest.approx(0.02, rel=0.3)  # the backbone's initializer_range
