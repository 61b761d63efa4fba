"""Engines that die or hang while they generate, for real: they come back with the current weights, and no row is lost."""

import dataclasses
import os
import signal
import threading
import time

import pytest
import ray

from pipelines.engines.config import Sampling
from pipelines.engines.engine import restarts
from pipelines.engines.pool import EngineError, cause_of_death

pytestmark = pytest.mark.engine

DEADLINE_S = 420
ROWS = 256  # enough that the engines are still at them when the fault comes


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: Engine\nmemory: high",
            "The actor died unexpectedly",
        ),
        ("", "ValueError"),
        (
            'The actor died because of an error raised in its creation task, Engine.__init__()\n  File "x.py", line 5\n    ^^^\n'
            "ValueError: no room for the cache\nlower kv_cache_gib",
            "ValueError: no room for the cache lower kv_cache_gib",
        ),
    ],
)
def test_a_dead_engine_is_reported_with_what_its_constructor_raised(said, cause):
    assert cause_of_death(ValueError(said)).startswith(cause)
    assert "\n" not in cause_of_death(ValueError(said))


def rows(count, version=3):
    return [
        {
            "row_id": i,
            "prompt_ids": [3, 20 + i % 50, 30],
            "prefix_ids": [],
            "n": 4,
            "max_new_tokens": 100,
            "seed": i,
            "chunk": False,
            "policy_version": version,
        }
        for i in range(count)
    ]


def generating(pool, **limits):
    """Start generating in a thread; the thread, where its result will be, and the first engine's process."""
    patient = dataclasses.replace(pool, config=dataclasses.replace(pool.config, **limits))
    pid = ray.get(pool.actors[0].__ray_call__.remote(lambda self: os.getpid()))
    result: dict = {}

    def run():
        try:
            result["completions"] = patient.generate(rows(ROWS), Sampling(1.0))
        except EngineError as error:
            result["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(1.0)
    assert thread.is_alive(), "generation was over before the fault"
    return thread, result, pid


def test_an_engine_killed_in_mid_generation_starts_again_with_the_current_weights(tiny_pool):
    pool, weights = tiny_pool
    before = restarts(weights)
    thread, result, pid = generating(pool)
    os.kill(pid, signal.SIGKILL)
    thread.join(timeout=DEADLINE_S)
    assert [len(c["response_ids"]) for c in result["completions"]] == [4] * ROWS  # every row once, from version 3
    assert {c["policy_version"] for c in result["completions"]} == {3}
    assert restarts(weights) == before + 1


def test_an_engine_that_hangs_meets_its_deadline_and_is_replaced(tiny_pool):
    pool, weights = tiny_pool
    before = restarts(weights)
    thread, result, pid = generating(pool, request_timeout_s=15.0)
    os.kill(pid, signal.SIGSTOP)
    thread.join(timeout=DEADLINE_S)
    assert [len(c["response_ids"]) for c in result["completions"]] == [4] * ROWS
    assert restarts(weights) == before + 1
