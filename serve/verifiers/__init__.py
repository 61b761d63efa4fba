"""Who scores what: a verifier is found by the `data_source` of a row.

A verifier is a function `score(response, ground_truth, extra_info) -> float` in [0, 1]. Those that run foreign or slow code are
`killable`: they are called in a subprocess with a wall clock.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

Score = Callable[[str, str, dict[str, Any]], float]


@dataclass(frozen=True)
class Verifier:
    """Where a verifier lives and whether it needs a process of its own."""

    module: str
    killable: bool
    needs_truth: bool = True

    def load(self) -> Score:
        return importlib.import_module(f"serve.verifiers.{self.module}").score


VERIFIERS = {
    "chain_arithmetic": Verifier("chain_arithmetic", killable=False),
    "graded_chain": Verifier("graded_chain", killable=False),
    "number_walk": Verifier("number_walk", killable=False),
    "reasoning_gym": Verifier("reasoning_gym_task", killable=True, needs_truth=False),  # data_source reasoning_gym/<dataset>
    "math": Verifier("math_answer", killable=True),  # data_source math or math/<anything>
    "gsm8k": Verifier("math_answer", killable=True),
    "openai/gsm8k": Verifier("math_answer", killable=True),
}


def find(data_source: str) -> Verifier:
    """The verifier of a data source, by its whole name or the part before `/`; LookupError names the near matches."""
    verifier = VERIFIERS.get(data_source) or VERIFIERS.get(data_source.partition("/")[0])
    if verifier is None:
        near = get_close_matches(data_source, VERIFIERS, n=3, cutoff=0.5) or sorted(VERIFIERS)
        raise LookupError(f"no verifier for data_source {data_source!r}: did you mean {', '.join(near)}?")
    return verifier
