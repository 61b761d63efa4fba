"""Who scores what: a verifier is found by the `data_source` of a row.

A verifier is a function `score(response, ground_truth, extra_info) -> float` in [0, 1]. Those that run foreign or slow code are
`killable`: they are called in a subprocess with a wall clock. Those that look for an answer in the response take the task's
`AnswerConfig` too, and the form that their data source has by convention. What a language model grades is in `serve/model_judge/`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from serve.verifiers.answer_form import AnswerConfig

Score = Callable[..., float]


@dataclass(frozen=True)
class Verifier:
    """Where a verifier lives, whether it needs a process of its own or a language model, and the form of its source's answers."""

    module: str
    killable: bool
    needs_truth: bool = True
    asks_model: bool = False
    form: str | None = None

    def load(self) -> Score:
        return importlib.import_module(f"serve.verifiers.{self.module}").score

    def refuses(self, truth: Any, answer: AnswerConfig) -> str | None:
        """Why nothing can be compared with a truth; None if it can."""
        check = getattr(importlib.import_module(f"serve.verifiers.{self.module}"), "why_unusable", None)
        return None if check is None else check(truth, answer.words)

    def score(self, item: dict[str, Any]) -> float:
        """The score of an item: `response`, `ground_truth`, `extra_info`, and `answer` (what `AnswerConfig` takes) if any."""
        given = (item["response"], item["ground_truth"], item["extra_info"])
        if self.form is None:
            return float(self.load()(*given))
        return float(self.load()(*given, AnswerConfig(**item.get("answer", {})), self.form))


BOXED = (
    "math",
    "aime",
    "imo_answerbench",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "HuggingFaceH4/aime_2024",
)
VERIFIERS = {
    "chain_arithmetic": Verifier("chain_arithmetic", killable=False),
    "graded_chain": Verifier("graded_chain", killable=False),
    "number_walk": Verifier("number_walk", killable=False),
    "reasoning_gym": Verifier(
        "reasoning_gym_task", killable=True, needs_truth=False, form="tag"
    ),  # data_source reasoning_gym/<dataset>
    **{name: Verifier("math_answer", killable=True, form="boxed") for name in BOXED},  # also math/<anything>
    **{name: Verifier("math_answer", killable=True, form="hash") for name in ("gsm8k", "openai/gsm8k")},
    "math_dapo": Verifier("math_answer", killable=True, form="stated"),
    "proof": Verifier("", killable=False, needs_truth=False, asks_model=True),  # data_source proof or proof/<anything>
}


def find(data_source: str) -> Verifier:
    """The verifier of a data source, by its whole name or the part before `/`; LookupError names the near matches."""
    verifier = VERIFIERS.get(data_source) or VERIFIERS.get(data_source.partition("/")[0])
    if verifier is None:
        near = get_close_matches(data_source, VERIFIERS, n=3, cutoff=0.5) or sorted(VERIFIERS)
        raise LookupError(f"no verifier for data_source {data_source!r}: did you mean {', '.join(near)}?")
    return verifier
