"""A real vLLM engine in its Ray actor: what it samples, what it says of it, and what a weight sync does to it."""

import dataclasses
import subprocess
import sys

import pytest
import ray
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pipelines.engines.config import Sampling
from pipelines.engines.pool import EngineError, EnginePool
from pipelines.weights.checksum import weights_checksum
from tests.conftest import configure
from tests.reference.grpo import logprobs_of

pytestmark = pytest.mark.engine

PROMPT = [3, *range(20, 90), 4]  # longer than a cache block, so that prefixes are reused
SAMPLING = Sampling(temperature=0.7)


@pytest.fixture(scope="module")
def pool(ray_cluster, random_model):
    config = dataclasses.replace(configure().engines, count=1, threads=2, max_num_seqs=64)
    pool = EnginePool.start(random_model, "float32", 256, config, seed=0)
    pool.wait_ready()
    yield pool
    pool.stop()


def row(row_id=0, n=4, tokens=24, version=0, seed=7, prefix=()):
    return {
        "row_id": row_id,
        "prompt_ids": PROMPT,
        "prefix_ids": list(prefix),
        "n": n,
        "max_new_tokens": tokens,
        "policy_version": version,
        "seed": seed,
        "chunk": False,
    }


def worst_difference(model, completion, prompt):
    """Between the engine's log-probabilities and a plain forward of the model."""
    worst = 0.0
    for ids, logprobs in zip(completion["response_ids"], completion["rollout_logprobs"], strict=True):
        with torch.no_grad():
            expected, _ = logprobs_of(model, prompt, ids.tolist(), SAMPLING.temperature)
        worst = max(worst, (expected - torch.tensor(logprobs)).abs().max().item())
    return worst


def test_continuations_lengths_seeds_and_text(pool):
    first, again, other = pool.generate([row(0), row(1), row(2, seed=8)], SAMPLING)
    ids_of = [[tuple(ids.tolist()) for ids in one["response_ids"]] for one in (first, again, other)]
    assert ids_of[0] == ids_of[1]
    assert ids_of[0] != ids_of[2]
    assert len(set(ids_of[0])) == 4  # each continuation has a seed of its own
    for ids, logprobs, reason in zip(first["response_ids"], first["rollout_logprobs"], first["finish_reason"], strict=True):
        assert len(ids) == len(logprobs)
        assert (reason == "stop") == (ids[-1] == 1)
        assert reason == "stop" or len(ids) == 24
    assert all("<|end|>" not in text for text in first["response_text"])


def test_logprobs_are_the_models_at_the_sampling_temperature(pool, random_model):
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    prefix = [30, 31, 32]
    (completion,) = pool.generate([row(3, prefix=prefix)], SAMPLING)
    assert worst_difference(model, completion, PROMPT + prefix) < 1e-4


def changed(folder, tmp_path, scale):
    """A copy of the model with other weights: the folder, its checksum, the model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, str(tmp_path / "model.safetensors"))
    return str(tmp_path), weights_checksum(weights.values()), model


def test_sync_brings_weights_version_and_a_clean_prefix_cache(pool, random_model, tmp_path):
    """The prompt was cached by the tests above: read from a stale cache, its continuations would have other log-probabilities."""
    folder, checksum, model = changed(random_model, tmp_path, 0.05)
    with pytest.raises(EngineError, match="version 0, but the plan asked for 5"):
        pool.generate([row(4, version=5)], SAMPLING)
    with pytest.raises(Exception, match=r"checksum .* is not the trainer's"):
        pool.load_weights(folder, 1, "0" * 42)
    pool.load_weights(folder, 5, checksum)
    (completion,) = pool.generate([row(5, version=5)], SAMPLING)
    assert completion["policy_version"] == 5
    assert worst_difference(model, completion, PROMPT) < 1e-4
    with pytest.raises(EngineError, match="version 5, but the plan asked for 0"):
        pool.generate([row(6)], SAMPLING)


PLAIN_ENGINE = """
import sys, dataclasses, os
from pipelines.engines.config import environment
from pipelines.engines.engine import Engine
from tests.conftest import configure
config = dataclasses.replace(configure().engines, max_num_seqs=8)
os.environ.update(environment(config))
import vllm._custom_ops
vllm._custom_ops._supports_onednn = False  # oneDNN packs weights where nobody can compare them
engine = Engine(sys.argv[1], "float32", 64, config, 0)
engine.load_weights(sys.argv[2], 1, sys.argv[3])
print(engine._llm.collective_rpc("load_checkpoint_weights", args=(sys.argv[2],)), flush=True)
os._exit(0)
"""


def test_resident_weights_are_the_trainers_bit_for_bit(random_model, tmp_path):
    folder, checksum, _ = changed(random_model, tmp_path, 0.05)
    command = [sys.executable, "-c", PLAIN_ENGINE, random_model, folder, checksum]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert f"[{{'read': '{checksum}', 'resident': '{checksum}'}}]" in done.stdout, done.stdout + done.stderr


def test_a_request_that_takes_too_long_is_an_error(pool):
    hurried = EnginePool(pool.actors, dataclasses.replace(pool.config, request_timeout_s=0.001, max_restarts=0))
    with pytest.raises(EngineError, match=r"did not finish generate within 0\.001 s"):
        hurried.generate([row(7, tokens=150, version=5)], SAMPLING)
    pool.generate([row(8, version=5)], SAMPLING)  # the engine itself goes on


def count_scheduled(engine):
    """In the engine's process: from now on, count the tokens its forwards compute."""
    scheduler = engine._llm.engine_core.engine_core.scheduler
    schedule, engine.scheduled = scheduler.schedule, 0

    def counted(*args, **kwargs):
        output = schedule(*args, **kwargs)
        engine.scheduled += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counted


def test_the_prefill_of_a_prefix_is_paid_once_by_its_group(pool):
    (actor,) = pool.actors
    ray.get(actor.__ray_call__.remote(count_scheduled))
    prefix = [20 + i % 90 for i in range(120)]
    pool.generate([row(n=16, tokens=1, version=5, prefix=prefix, seed=3)], SAMPLING)  # the first token comes out of the prefill
    computed = ray.get(actor.__ray_call__.remote(lambda engine: engine.scheduled))
    length, block = len(PROMPT) + len(prefix), pool.config.block_size
    assert length <= computed <= length + 15 * block  # the other 15 compute no more than their last, partial block
    assert computed < 16 * length / 4
