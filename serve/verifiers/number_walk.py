"""Number walk: from a start to a target in at most M moves of one digit, every move written out.

Prompt `37>82/8` (start, target, moves allowed), correct response `37+9=46;46+9=55;...;73+9=82;#`. Progress shows in the last
number, so a prefix is easy to judge.
"""

import re

_MOVE = re.compile(r"(\d{2})([+-])(\d)=(\d{2});")


def score(response: str, ground_truth: str, extra_info: dict) -> float:
    """1.0 if every move is right, none is left over and the last number is the target; `ground_truth` is the prompt."""
    start, target, limit = (int(number) for number in re.split("[>/]", ground_truth))
    if not response.endswith("#"):
        return 0.0
    here, moves, at = start, 0, 0
    while at < len(response) - 1:
        match = _MOVE.match(response, at)
        if match is None:
            return 0.0
        before, sign, digit, after = int(match[1]), match[2], int(match[3]), int(match[4])
        if before != here or after != here + (digit if sign == "+" else -digit):
            return 0.0
        here, moves, at = after, moves + 1, match.end()
    return float(here == target and moves <= limit)
