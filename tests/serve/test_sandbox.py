"""Verifiers that loop, die, print or raise cost their caller the wall clock and no more."""

import sys
import time
import types

import pytest

import serve.verifiers as verifiers
from serve.sandbox import Sandbox

HOSTILE = """
import os, time
def score(response, ground_truth, extra_info):
    print("noise on stdout")
    if response == "loop":
        while True: pass
    if response == "die": os._exit(3)
    if response == "raise": raise RuntimeError("bad response")
    return len(response)
"""


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    """A sandbox whose subprocess knows a verifier of this test, through a `sitecustomize` of its own."""
    (tmp_path / "hostile_verifier.py").write_text(HOSTILE)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.dont_write_bytecode = True\n"
        "import serve.verifiers as v, hostile_verifier as h\n"
        "sys.modules['serve.verifiers.hostile'] = h\n"
        "v.VERIFIERS['hostile'] = v.Verifier('hostile', killable=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Sandbox(timeout_s=1.0) as box:
        yield box


def score(box, scorer, response, truth=""):
    (result,) = box.score(scorer, [{"response": response, "ground_truth": truth, "extra_info": {}}])
    return result


def test_a_loop_is_killed_and_the_next_item_is_scored(sandbox):
    assert score(sandbox, "hostile", "four") == 4.0
    start = time.monotonic()
    assert score(sandbox, "hostile", "loop") == "timeout: no score within 1 s"
    assert time.monotonic() - start < 30  # it came back at all
    assert score(sandbox, "hostile", "ok") == 2.0


def test_a_dead_process_and_an_exception_are_errors(sandbox):
    assert score(sandbox, "hostile", "die") == "error: the verifier's process died"
    assert score(sandbox, "hostile", "raise") == "error: RuntimeError: bad response"
    assert score(sandbox, "hostile", "ok") == 2.0


def test_real_verifiers_run_in_it():
    with Sandbox(timeout_s=20.0) as box:
        assert score(box, "math", "\\boxed{2}", "2") == 1.0
        assert "no verifier" in score(box, "unheard_of", "")


def test_registry_and_modules_agree():
    for name, verifier in verifiers.VERIFIERS.items():
        if verifier.asks_model:
            continue  # no module: a language model grades it
        assert isinstance(verifier.load(), types.FunctionType), name
    assert "serve.verifiers.math_answer" in sys.modules
