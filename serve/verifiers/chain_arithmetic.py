"""Chain arithmetic: start below 100, then a chain of `+d` / `-d` modulo 100, every step written out.

Prompt `37+5-9`, correct response `37+5=42;42-9=33;#33`. Only the number after `#` is scored, so one wrong step spoils all
that follow it, and judging a prefix means checking it.
"""

import re

_FINAL = re.compile(r"#(\d{2})\s*$")


def score(response: str, ground_truth: str, extra_info: dict) -> float:
    """1.0 if the response ends in `#NN` with the right number, else 0.0."""
    match = _FINAL.search(response)
    return float(match is not None and match.group(1) == ground_truth)
