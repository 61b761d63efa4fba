"""The trainer's numbers: the same on any number of ranks and any split, and those of the plain reference."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pipelines import model as model_module
from pipelines import train_state
from pipelines.batching import sequences_of
from pipelines.learner import Learner, NonFiniteError
from pipelines.settings import ModelConfig, OptimizerConfig
from tests.conftest import configure
from tests.distributed import run_ranks
from tests.reference.grpo import grpo_update, logprobs_of

OPTIMIZER = OptimizerConfig(
    lr=1e-3,
    betas=(0.9, 0.99),
    eps=1e-3,  # AdamW with a tiny epsilon divides rounding errors by themselves
    weight_decay=0.01,
    schedule="constant",
    warmup_steps=0,
    clip_grad_norm=1.0,
    max_nonfinite_steps=2,
)
TEMPERATURE = 0.8


def make_groups() -> list[dict]:
    """Six groups of four, of many lengths, with prefixes; rollout log-probabilities a little off, one reward missing."""
    rng = np.random.default_rng(5)
    groups = []
    for i in range(6):
        responses = [rng.integers(8, 100, size=rng.integers(1, 40)).tolist() for _ in range(4)]
        rewards = rng.integers(0, 2, size=4).astype(float).tolist()
        groups.append(
            {
                "row_id": i,
                "n": 4,
                "purpose": "train",
                "from_critic": [False] * 4,
                "endpoint_value": [None] * 4,
                "prefix_value": None,
                "prompt_ids": rng.integers(8, 100, size=rng.integers(3, 12)).tolist(),
                "prefix_ids": rng.integers(8, 100, size=rng.integers(0, 9)).tolist(),
                "response_ids": responses,
                "rollout_logprobs": [(-4.6 + 0.3 * rng.standard_normal(len(r))).tolist() for r in responses],
                "reward": [None, *rewards[1:]] if i == 2 else rewards,
                "finish_reason": ["stop"] * 4,
            }
        )
    return groups


def credited(groups: list[dict]) -> list[dict]:
    from pipelines.rollout import as_group

    credits = [configure().algorithm.credit(as_group(group)) for group in groups]
    return [
        group | {"advantage": c.advantages.tolist(), "actor_mask": c.actor_mask.tolist()}
        for group, c in zip(groups, credits, strict=True)
    ]


def make_learner(folder: str, max_tokens: int, optimizer: OptimizerConfig = OPTIMIZER, **fields) -> Learner:
    return Learner(
        ModelConfig(folder, "float32", fields.pop("gradient_checkpointing", False)),
        optimizer,
        temperature=TEMPERATURE,
        horizon=40,
        max_tokens=max_tokens,
        device=torch.device("cpu"),
        **fields,
    )


def share(groups: list[dict]) -> list[dict]:
    """An uneven share for each rank: rank 0 gets all but the last group."""
    if dist.get_world_size() == 1:
        return groups
    return groups[:-1] if dist.get_rank() == 0 else groups[-1:]


def updated(folder: str, max_tokens: int = 4096, logits: int = 1 << 26, checkpointing: bool = False, **fields) -> dict:
    """Metrics and weights after one GRPO update on this rank's share of the groups."""
    model_module.LOGIT_ELEMENTS = logits
    algorithm = dataclasses.replace(configure().algorithm, **fields)
    reference = folder if algorithm.needs_reference else None
    learner = make_learner(folder, max_tokens, reference_path=reference, gradient_checkpointing=checkpointing)
    metrics = algorithm.update(learner, share(credited(make_groups())))
    model_module.LOGIT_ELEMENTS = 1 << 26
    return {"metrics": metrics, "weights": model_module.full_state_dict(learner.policy, torch.float32)}


def worst_logprob(folder: str) -> float:
    """The largest difference on this rank between the sharded policy and a plain forward of each sequence alone."""
    learner = make_learner(folder, 256)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worst = 0.0
    for sequence in learner.receive(credited(make_groups()), with_old_logprobs=True, with_ref_logprobs=False):
        if sequence.actor_mask:
            ids = sequence.ids.tolist()
            with torch.no_grad():
                expected, _ = logprobs_of(plain, ids[: sequence.prompt_length], ids[sequence.prompt_length :], TEMPERATURE)
            worst = max(worst, float(np.abs(sequence.old_logprobs - expected.numpy()).max()))
    return worst


def poisoned_steps(folder: str) -> tuple[bool, float, bool]:
    """Two steps whose loss is NaN on rank 0: were the weights kept, was it counted, did the second stop the run?"""
    learner = make_learner(folder, 4096)
    before = model_module.full_state_dict(learner.policy, torch.float32)
    sequences = learner.receive(share(credited(make_groups())), True, False)

    def poisoned(tokens):
        return tokens.logprobs * (float("nan") if dist.get_rank() == 0 else 1.0), {}

    metrics = learner.step(sequences, poisoned, "token-mean", False)
    after = model_module.full_state_dict(learner.policy, torch.float32)
    same = all(torch.equal(before[name], after[name]) for name in before)
    try:
        learner.step(sequences, poisoned, "token-mean", False)
    except NonFiniteError:
        return same, metrics["actor/nonfinite_steps"], True
    return same, metrics["actor/nonfinite_steps"], False


def second_update(folder: str, path: str) -> dict:
    """Weights after two updates: on two ranks with a checkpoint between them, on one rank from that checkpoint."""
    learner = make_learner(folder, 4096)
    if dist.get_world_size() == 2:
        configure().algorithm.update(learner, share(credited(make_groups())))
        train_state.save(learner, Path(path), folder, {"step": 1}, {"step": 1})
    else:
        train_state.load(learner, path)
        assert learner.updates == 2
    configure().algorithm.update(learner, share(credited(make_groups())))
    return model_module.full_state_dict(learner.policy, torch.float32)


EXTRAS = {"kl_estimator": "k3", "kl_coef": 0.1, "entropy_coef": 0.01, "loss_aggregation": "seq-mean-token-mean"}


def everything(folder: str, path: str) -> dict:
    """All that the tests below compare, in one set of processes: starting them is what takes the time."""
    results = {
        "plain": updated(folder),
        "small": updated(folder, max_tokens=64),
        "extras": updated(folder, max_tokens=64, **EXTRAS),
        "second": second_update(folder, path),
    }
    if dist.get_world_size() == 1:
        results["chunked"] = updated(folder, logits=128 * 5)
        results["checkpointing"] = updated(folder, checkpointing=True)
    else:
        results |= {"logprobs": worst_logprob(folder), "poisoned": poisoned_steps(folder)}
    return results


@pytest.fixture(scope="module")
def results(random_model: str, tmp_path_factory) -> dict[int, list[dict]]:
    """The results of each rank, by number of ranks; two ranks go first and leave the checkpoint."""
    path = str(tmp_path_factory.mktemp("checkpoints") / "step_000001")
    return {ranks: run_ranks(everything, ranks, random_model, path) for ranks in (2, 1)} | {"path": path}


@pytest.fixture(scope="module")
def one(results) -> dict:
    return results[1][0]


@pytest.fixture(scope="module")
def two(results) -> dict:
    return results[2][0]


def assert_same(first: dict, other: dict, tolerance: float = 1e-5) -> None:
    for name, value in first["metrics"].items():
        assert other["metrics"][name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    for name, value in first["weights"].items():
        torch.testing.assert_close(other["weights"][name], value, rtol=0, atol=tolerance)


def test_matches_the_plain_reference(random_model: str, one: dict):
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.01)
    groups = [
        {
            "prompt": group["prompt_ids"] + group["prefix_ids"],
            "responses": group["response_ids"],
            "rollout_logprobs": group["rollout_logprobs"],
            "rewards": group["reward"],
        }
        for group in make_groups()
    ]
    losses, norms = grpo_update(
        model,
        optimizer,
        groups,
        minibatches=2,
        temperature=TEMPERATURE,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        tis_cap=2.0,
        max_grad_norm=1.0,
    )
    assert one["plain"]["metrics"]["actor/pg_loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert one["plain"]["metrics"]["actor/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    state = model.state_dict()
    for name, value in one["plain"]["weights"].items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=1e-6)


def test_two_ranks_and_any_microbatch_split_give_the_same(one: dict, two: dict):
    """Rank 1 has one group of six, so it runs dummies; the cap of 64 tokens makes a micro-batch of nearly every sequence."""
    assert_same(one["plain"], two["plain"])
    assert_same(one["plain"], two["small"])
    assert_same(one["plain"], one["small"])


def test_chunked_logits_and_gradient_checkpointing_change_nothing(one: dict):
    assert_same(one["plain"], one["chunked"])
    assert_same(one["plain"], one["checkpointing"])


def test_kl_and_entropy_terms_are_split_invariant(one: dict, two: dict):
    assert one["extras"]["metrics"]["actor/kl_loss"] > 0  # the second minibatch has moved away from the reference
    assert_same(one["extras"], two["extras"])


def test_every_rank_computes_the_models_own_logprobs(results):
    """Buffers such as rotary frequencies are in no state dict; a rank that starts empty must get them too."""
    assert max(rank["logprobs"] for rank in results[2]) < 1e-5


def test_a_nonfinite_loss_on_one_rank_skips_the_step_on_all_and_then_stops(results):
    assert [rank["poisoned"] for rank in results[2]] == [(True, 1.0, True)] * 2


def test_a_checkpoint_of_two_ranks_goes_on_on_one(results, one: dict, two: dict):
    for name, value in two["second"].items():
        torch.testing.assert_close(one["second"][name], value, rtol=0, atol=1e-6)
    assert AutoModelForCausalLM.from_pretrained(f"{results['path']}/model").config.model_type == "qwen3"


def test_prompt_and_prefix_get_no_loss():
    """Every selected position predicts a response token; not one token of prompt or prefix is a target."""
    from pipelines.batching import pad

    for group in credited(make_groups()):
        sequences = sequences_of(group)
        padded = pad(sequences, torch.device("cpu"))
        assert padded.targets.tolist() == [token for response in group["response_ids"] for token in response]
        length = padded.input_ids.shape[1]
        start = len(group["prompt_ids"]) + len(group["prefix_ids"])
        assert min(int(p) % length for p in padded.select) == start - 1
