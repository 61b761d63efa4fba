"""The trainer's numbers: the same on any number of ranks and any split, and those of the plain reference."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from algorithms.policy_update import has_actor_loss
from algorithms.types import Lesson, Recalled
from pipelines.trainer import policy as model_module
from pipelines.trainer import state as train_state
from pipelines.trainer.batching import samples_of
from pipelines.trainer.learner import dealt
from pipelines.trainer.optimizer import NonFiniteError
from tests.conftest import configure
from tests.distributed import run_ranks
from tests.learner_parts import OPTIMIZER, TEMPERATURE, credited, make_groups, make_learner, share
from tests.reference.ac2 import ac2_update
from tests.reference.grpo import grpo_update, logprobs_of

pytestmark = pytest.mark.slow


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
    """The largest difference on this rank between the sharded policy and a plain forward of each sample alone."""
    learner = make_learner(folder, 256)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worst = 0.0
    for sample in learner.receive(credited(make_groups()), {"policy": has_actor_loss}):
        if sample.actor_mask:
            ids = sample.ids.tolist()
            with torch.no_grad():
                expected, _ = logprobs_of(plain, ids[: sample.prompt_length], ids[sample.prompt_length :], TEMPERATURE)
            worst = max(worst, float(np.abs(sample.old_logprobs - expected.numpy()).max()))
    return worst


def warming_rates(folder: str, path: Path) -> list[list[float]]:
    """Rates of two steps in each of three batches and one without a step, by unit; the last batch after a checkpoint."""
    found = []
    for unit in ("optimizer_step", "rollout_batch"):
        optimizer = dataclasses.replace(OPTIMIZER, lr=1.0, warmup_steps=4, warmup_by=unit)
        learner, rates = make_learner(folder, 4096, optimizer=optimizer), []
        for steps in (2, 0, 2, 2):
            if len(rates) == 4:
                train_state.save(learner, path / unit, {}, {"step": 3})
                learner = make_learner(folder, 4096, optimizer=optimizer)
                train_state.load(learner, path / unit)
            samples = learner.receive(share(credited(make_groups())), {})
            rates += [learner.step("actor", samples, lambda tokens: (0 * tokens.logprobs, {})).lr for _ in range(steps)]
        found.append(rates)
    return found


def poisoned_steps(folder: str) -> tuple[bool, float, bool]:
    """Two steps whose loss is NaN on rank 0: were the weights kept, was it counted, did the second stop the run?"""
    learner = make_learner(folder, 4096)
    before = model_module.full_state_dict(learner.policy, torch.float32)
    samples = learner.receive(share(credited(make_groups())), {})

    def poisoned(tokens):
        return tokens.logprobs * (float("nan") if dist.get_rank() == 0 else 1.0), {}

    step = learner.step("actor", samples, poisoned)
    after = model_module.full_state_dict(learner.policy, torch.float32)
    same = all(torch.equal(before[name], after[name]) for name in before)
    try:
        learner.step("actor", samples, poisoned)
    except NonFiniteError:
        return same, float(step.skipped), True
    return same, float(step.skipped), False


def second_update(folder: str, path: str) -> dict:
    """Weights after two updates: on two ranks with a checkpoint between them, on one rank from that checkpoint."""
    learner = make_learner(folder, 4096)
    if dist.get_world_size() == 2:
        configure().algorithm.update(learner, share(credited(make_groups())))
        train_state.save(learner, Path(path), {"step": 1}, {"step": 1})
    else:
        train_state.load(learner, path)
        assert learner.updates == {"actor": 2}
    configure().algorithm.update(learner, share(credited(make_groups())))
    return model_module.full_state_dict(learner.policy, torch.float32)


LESSONS = [Lesson(np.arange(20, 20 + 3 * i), (25, 23, 30 + i, 1)[: 2 + i % 3], 0.5 + 0.5 * (i % 2)) for i in range(1, 8)]


class ScriptedMemory:
    """The algorithm's memory with fixed lessons, shared among the ranks as the coordinator shares them."""

    def recall(self) -> Recalled:
        values = {"clip_offset": 0.06, "self_critic_lr": 2e-3, "streak": 1.0}
        return Recalled(values, LESSONS[dist.get_rank() :: dist.get_world_size()], sum(e.weight for e in LESSONS))

    def remember(self, values: dict[str, float]) -> None:
        self.left = values


def ac2_groups() -> list[dict]:
    """The groups with a refill rollout before them, credited by AC2."""
    refill = make_groups()[0] | {"row_id": 99, "n": 1, "purpose": "refill", "prefix_ids": []}
    refill |= {name: refill[name][:1] for name in ("response_ids", "rollout_logprobs")}
    return credited([refill, *make_groups()], configure("algorithm=ac2").algorithm)


def ac2_updated(folder: str, max_tokens: int = 4096) -> dict:
    """Metrics, weights and what was left with the memory after one AC2 update."""
    algorithm = dataclasses.replace(configure("algorithm=ac2").algorithm, importance_cap=None)
    memory = ScriptedMemory()
    optimizers = {"self_critic": dataclasses.replace(algorithm.optimizers["self_critic"], eps=1e-3)}
    learner = make_learner(folder, max_tokens, optimizers=optimizers, memory=memory, credit_type=algorithm.credit_type)
    metrics = algorithm.update(learner, share(ac2_groups()))
    weights = model_module.full_state_dict(learner.policy, torch.float32)
    return {"metrics": metrics, "weights": weights, "left": memory.left}


def weightless_step(folder: str, tokens: int) -> float:
    """The loss of a step of the actor that counts further tokens on each rank."""
    learner = make_learner(folder, 4096)
    samples = learner.receive(share(credited(make_groups())), {"policy": lambda sample: True})
    minibatch = [sample for sample in samples if sample.actor_mask]
    return learner.step("actor", minibatch, configure().algorithm.loss, weightless_tokens=tokens).loss


def controlled(folder: str) -> dict:
    """An update of GRPO with AC2's entropy control: its metrics, and what it left with the memory."""
    memory = ScriptedMemory()
    fields = "{target:0.28,step:0.02,minimum:-0.08,maximum:0.08,initial:0.06}"
    algorithm = configure(f"algorithm.entropy={fields}").algorithm
    learner = make_learner(folder, 4096, memory=memory)
    groups = [{**group, "prefix_ids": []} for group in make_groups()]  # the entropy is that of responses from the prompt
    return {"metrics": algorithm.update(learner, share(credited(groups, algorithm))), "left": memory.left}


EXTRAS = {"kl_estimator": "k3", "kl_coef": 0.1, "entropy_coef": 0.01, "loss_aggregation": "seq-mean-token-mean"}


def everything(folder: str, path: str) -> dict:
    """All that the tests below compare, in one set of processes: starting them is what takes the time."""
    results = {
        "plain": updated(folder),
        "small": updated(folder, max_tokens=64),
        "extras": updated(folder, max_tokens=64, **EXTRAS),
        "second": second_update(folder, path),
        "ac2": ac2_updated(folder),
        "ac2_small": ac2_updated(folder, max_tokens=64),
        "weightless": [weightless_step(folder, tokens) for tokens in (0, 10)],
        "controlled": controlled(folder),
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


def test_ac2_matches_the_plain_reference(random_model: str, one: dict):
    """Actor, critic, actor on the same weights with two optimizers, to the number."""
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    actor = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.01)
    critic = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0)
    refill, *groups = ac2_groups()
    samples = [
        (group["prompt_ids"] + group["prefix_ids"], response, advantage)
        for group in groups
        for response, advantage in zip(group["response_ids"], group["advantages"], strict=True)
    ]
    from_prompt = [(g["prompt_ids"], r) for g in [refill, *groups] if not g["prefix_ids"] for r in g["response_ids"]]
    with torch.no_grad():
        entropies = torch.cat([logprobs_of(model, prompt, response, TEMPERATURE)[1] for prompt, response in from_prompt])
    offset = 0.06 + (0.02 if entropies.mean() < 0.28 else -0.02)
    first, between, second, loss = ac2_update(
        model,
        actor,
        critic,
        samples,
        [(e.context.tolist(), list(e.answer), e.weight) for e in LESSONS],
        temperature=TEMPERATURE,
        clip_low=0.2,
        clip_high=0.28 + offset,
        dual_clip=3.0,
        actor_norm=1.0,
        critic_norm=0.2,
    )
    metrics = one["ac2"]["metrics"]
    assert metrics["actor/prompt_entropy"] == pytest.approx(float(entropies.mean()), rel=1e-5)
    assert metrics["ac2/self_critic_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["actor/update_norm"] == pytest.approx((first + second) / 2, rel=1e-3)
    assert metrics["ac2/self_critic_update_norm"] == pytest.approx(between, rel=1e-3)
    state = model.state_dict()
    for name, value in one["ac2"]["weights"].items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=2e-6)
    assert between <= 2 * (first + second)  # so the streak ends
    assert one["ac2"]["left"] == {"clip_offset": pytest.approx(offset), "self_critic_lr": 2e-3, "streak": 0.0}


def test_ac2_is_the_same_on_any_ranks_and_split(one: dict, two: dict):
    assert_same(one["ac2"], two["ac2"])
    assert_same(one["ac2"], two["ac2_small"])


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


def test_weightless_tokens_are_in_the_denominator_of_all_ranks(one: dict, two: dict):
    """The loss is a sum over the rest: 10 more tokens on each rank make it smaller by as much."""
    tokens = sum(
        len(r) for g in make_groups() for r, reward in zip(g["response_ids"], g["reward"], strict=True) if reward is not None
    )
    for ranks, found in ((1, one), (2, two)):
        without, counted = found["weightless"]
        assert counted == pytest.approx(without * tokens / (tokens + 10 * ranks), rel=1e-5)


def test_grpo_may_have_the_entropy_control_of_ac2(one: dict, two: dict):
    entropy = one["controlled"]["metrics"]["actor/prompt_entropy"]
    offset = 0.06 + (0.02 if entropy < 0.28 else -0.02)
    for found in (one, two):
        assert found["controlled"]["left"] == {"clip_offset": pytest.approx(offset)}
        assert found["controlled"]["metrics"]["actor/clip_high"] == pytest.approx(0.28 + offset)
        assert found["controlled"]["metrics"]["actor/prompt_entropy"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize(("count", "size"), [(2, 24), (3, 25), (4, 7)])
def test_balanced_minibatches_are_dealt_out_by_length(count, size):
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 200, size)
    hands: list[list[int]] = [[] for _ in range(count)]
    for place, length in enumerate(sorted(lengths.tolist(), reverse=True)):
        hands[dealt(place, count)].append(length)
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    assert max(map(sum, hands)) - min(map(sum, hands)) <= lengths.max()


def test_prompt_and_prefix_get_no_loss():
    """Every selected position predicts a response token; not one token of prompt or prefix is a target."""
    from pipelines.trainer.batching import pad

    for group in credited(make_groups()):
        samples = samples_of(group)
        padded = pad(samples, torch.device("cpu"))
        assert padded.targets.tolist() == [token for response in group["response_ids"] for token in response]
        length = padded.input_ids.shape[1]
        start = len(group["prompt_ids"]) + len(group["prefix_ids"])
        assert min(int(p) % length for p in padded.select) == start - 1


def test_a_rate_warms_up_by_optimizer_steps_or_by_rollout_batches(random_model, tmp_path):
    """Four units: by step 1/4, 2/4, 3/4, 1 and on; by batch both steps of one share a rate, and a batch without a step is none."""
    (rates,) = run_ranks(warming_rates, 1, random_model, tmp_path)
    assert rates == [[0.25, 0.5, 0.75, 1, 1, 1], [0.25, 0.25, 0.5, 0.5, 0.75, 0.75]]
