"""Engines that die or hang while they generate, for real: they come back with the current weights, and no row is lost."""

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import ray

from pipelines.engine import Sampling, restarts
from pipelines.engine_pool import EngineError, EnginePool
from tests.conftest import configure

pytestmark = pytest.mark.engine

DEADLINE_S = 420
TINY = str(Path(__file__).parents[2] / "pipelines/assets/tiny")


def rows(count, version=3):
    return [
        {
            "row_id": i,
            "prompt_ids": [3, 20 + i % 50, 30],
            "prefix_ids": [],
            "n": 4,
            "max_new_tokens": 100,
            "seed": i,
            "policy_version": version,
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def pool(ray_cluster, tmp_path_factory):
    """One engine at weights version 3, that may start again twice in all."""
    from safetensors.torch import load_file

    from pipelines.checksum import weights_checksum
    from pipelines.weight_sync import write_current

    weights = tmp_path_factory.mktemp("weights")
    config = dataclasses.replace(configure().engines, count=1, max_restarts=2)
    pool = EnginePool.start(TINY, "float32", 256, config, seed=0, weights_dir=str(weights))
    pool.wait_ready()
    current = write_current(weights, load_file(f"{TINY}/model.safetensors"), version=3)
    pool.load_weights(**current)
    assert current["checksum"] == weights_checksum(load_file(f"{TINY}/model.safetensors").values())
    yield pool, str(weights)
    pool.stop()


def generating(pool, count, **limits):
    """Start generating in a thread; the thread, where its result will be, and the engine's process."""
    patient = dataclasses.replace(pool, config=dataclasses.replace(pool.config, **limits))
    (pid,) = ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in pool.actors])
    result: dict = {}

    def run():
        try:
            result["completions"] = patient.generate(rows(count), Sampling(1.0))
        except EngineError as error:
            result["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(1.0)
    assert thread.is_alive(), "generation was over before the fault"
    return thread, result, pid


def test_an_engine_killed_in_mid_generation_starts_again_with_the_current_weights(pool):
    pool, weights = pool
    thread, result, pid = generating(pool, 512)
    os.kill(pid, signal.SIGKILL)
    thread.join(timeout=DEADLINE_S)
    assert [len(c["response_ids"]) for c in result["completions"]] == [4] * 512  # every row once, from version 3
    assert {c["policy_version"] for c in result["completions"]} == {3}
    assert restarts(weights) == 1


def test_an_engine_that_hangs_meets_its_deadline_and_is_replaced(pool):
    pool, weights = pool
    thread, result, pid = generating(pool, 256, request_timeout_s=15.0)
    os.kill(pid, signal.SIGSTOP)
    thread.join(timeout=DEADLINE_S)
    assert [len(c["response_ids"]) for c in result["completions"]] == [4] * 256
    assert restarts(weights) == 2
