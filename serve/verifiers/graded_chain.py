"""Graded chain: chain arithmetic of 4 to 20 operations whose reward is the part of the work that is right.

Prompt `37+5-9`, correct response `37+5=42;42-9=33;#33`. A response may end early, for less reward; one that never ends gets none,
as code that is cut off would. Rewards so differ in scale and in noise from problem to problem.
"""

import re

_END = re.compile(r"#\d{2}$")


def score(response: str, ground_truth: str, extra_info: dict) -> float:
    """Right steps before the first wrong one over all operations of the problem, 0 without an end; `ground_truth` is the prompt."""
    if not _END.search(response):
        return 0.0
    operations = re.findall(r"[+-]\d", ground_truth)
    here, right = int(ground_truth[:2]), 0
    for step, operation in zip(response[:-3].split(";"), operations, strict=False):
        after = (here + int(operation)) % 100
        if step != f"{here:02d}{operation}={after:02d}":
            break
        here, right = after, right + 1
    return right / len(operations)
