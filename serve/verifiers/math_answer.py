"""Final answers in mathematics, compared as expressions by `math-verify`."""

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from serve.verifiers.math_bounds import bound_binomials, too_deep, too_large

# The caller's wall clock bounds the time; math-verify's own alarms work in main threads only.
_EXTRACTION = [LatexExtractionConfig(), ExprExtractionConfig()]

bound_binomials()


def score(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 if the last answer in the response (boxed, LaTeX or a number) equals the ground truth, else 0.0.

    Reasoning in `<think>...</think>` is not searched; of a GSM8K solution the part after `####` is the truth. Numbers that are too
    large to be evaluated are equal only if they are written the same.
    """
    truth = parse(f"${ground_truth.rpartition('####')[2].strip()}$", extraction_config=_EXTRACTION, parsing_timeout=None)
    if not truth:
        raise ValueError(f"ground truth {ground_truth!r} is not a mathematical expression")
    final = response.rpartition("</think>")[2]
    if too_deep(final):
        return 0.0
    answer = parse(final, extraction_config=_EXTRACTION, parsing_timeout=None)
    texts = [{one for one in found if isinstance(one, str)} for found in (truth, answer)]
    if any(too_large(one) for one in (*truth, *answer) if not isinstance(one, str)):
        return float(bool(texts[0] & texts[1]))
    return float(verify(truth, answer, timeout_seconds=None))
