"""How large a parsed expression would be if it were evaluated: towers and factorials end a comparison before it begins."""

import math
from typing import Any

import sympy

MOST_DIGITS = 20_000.0
DEEPEST = 300


def too_deep(text: str) -> bool:
    """Whether braces or parentheses nest deeper than any answer's: parsers take time that grows with a power of the depth."""
    depth = deepest = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth = max(depth - 1, 0)
    return deepest > DEEPEST


def too_large(expression: sympy.Basic) -> bool:
    """Whether any part of an expression would have more than `MOST_DIGITS` digits, or is too deep to be looked at."""
    try:
        return _digits(expression) > MOST_DIGITS
    except (RecursionError, OverflowError, AttributeError, TypeError):
        return True


def _digits(e: Any) -> float:
    """An upper bound of the decimal digits of an expression or of its largest part; a symbol counts as one, infinity is refused."""
    if not isinstance(e, sympy.Basic) or not e.args:
        return math.log10(max(abs(e.p), e.q) + 1) if isinstance(e, sympy.Rational) else 1.0
    parts = [_digits(part) for part in e.args]
    largest = max(parts)
    if largest > MOST_DIGITS:
        return largest
    if isinstance(e, sympy.Pow):
        return max(largest, max(parts[0], 1.0) * _value(parts[1]))
    if isinstance(e, sympy.exp):
        return max(largest, _value(parts[0]))
    if isinstance(e, sympy.factorial | sympy.factorial2 | sympy.gamma):
        n = _value(parts[0])
        return n * math.log10(max(n, 10.0))
    if isinstance(e, sympy.binomial):
        return max(largest, _value(parts[0]))
    return sum(parts) if isinstance(e, sympy.Mul | sympy.Add) else largest


def _value(digits: float) -> float:
    """The largest number with so many digits."""
    return 10.0**digits if digits < 9 else math.inf


def bound_binomials() -> None:
    """Leave binomials of large numbers as they are: the LaTeX parser would evaluate them while it reads."""
    evaluate = sympy.binomial.eval

    def bounded(n: Any, k: Any) -> Any:
        return None if max(_digits(n), _digits(k)) > 4 else evaluate(n, k)

    sympy.binomial.eval = bounded
