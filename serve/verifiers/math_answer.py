"""Final answers in mathematics, compared as expressions by `math-verify`."""

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# The caller's wall clock bounds the time; math-verify's own alarms work in main threads only.
_EXTRACTION = [LatexExtractionConfig(), ExprExtractionConfig()]


def score(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 if the last answer in the response (boxed, LaTeX or a number) equals the ground truth, else 0.0.

    Reasoning in `<think>...</think>` is not searched; of a GSM8K solution the part after `####` is the truth.
    """
    truth = parse(f"${ground_truth.rpartition('####')[2].strip()}$", extraction_config=_EXTRACTION, parsing_timeout=None)
    if not truth:
        raise ValueError(f"ground truth {ground_truth!r} is not a mathematical expression")
    answer = parse(response.rpartition("</think>")[2], extraction_config=_EXTRACTION, parsing_timeout=None)
    return float(verify(truth, answer, timeout_seconds=None))
