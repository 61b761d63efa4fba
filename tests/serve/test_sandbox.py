"""Verifiers that loop, die, print or raise cost their caller the wall clock and no more."""

import sys
import time
import types

import pytest

import serve.verifiers as verifiers
from serve.sandbox import Sandbox, SandboxError, SandboxTimeout

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
    box = Sandbox(timeout_s=1.0)
    yield box
    box.close()


def test_a_loop_is_killed_and_the_next_item_is_scored(sandbox):
    assert sandbox.score("hostile", "four", "", {}) == 4.0
    start = time.monotonic()
    with pytest.raises(SandboxTimeout, match="1 s"):
        sandbox.score("hostile", "loop", "", {})
    assert time.monotonic() - start < 30  # it came back at all
    assert sandbox.score("hostile", "ok", "", {}) == 2.0


def test_a_dead_process_and_an_exception_are_errors(sandbox):
    with pytest.raises(SandboxError, match="died"):
        sandbox.score("hostile", "die", "", {})
    with pytest.raises(SandboxError, match="RuntimeError: bad response"):
        sandbox.score("hostile", "raise", "", {})
    assert sandbox.score("hostile", "ok", "", {}) == 2.0


def test_real_verifiers_run_in_it():
    box = Sandbox(timeout_s=20.0)
    try:
        assert box.score("math", "\\boxed{2}", "2", {}) == 1.0
        with pytest.raises(SandboxError, match="no verifier"):
            box.score("unheard_of", "", "", {})
    finally:
        box.close()


def test_registry_and_modules_agree():
    for name, verifier in verifiers.VERIFIERS.items():
        assert isinstance(verifier.load(), types.FunctionType), name
    assert "serve.verifiers.math_answer" in sys.modules
