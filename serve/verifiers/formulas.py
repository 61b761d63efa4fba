"""Whether two formulas are equal: read by `math-verify`, evaluated exactly enough to tell unequal ones apart."""

import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from serve.verifiers.math_bounds import bound_binomials, too_deep, too_large

LONGEST = 5_000  # characters
PRECISION, MOST_PRECISION = 60, 500  # digits of an evaluation, and those that it may take to find them
ZERO = sympy.Float("1e-30", PRECISION)  # a difference of this part of what was subtracted is none
POINTS = tuple(sympy.Float(text, PRECISION) for text in ("1.37", "2.91", "0.53", "13.7", "100.3", "1009.6"))
STEP = sympy.Float("0.17", PRECISION)

# The caller's wall clock bounds the time; math-verify's own alarms work in main threads only. Its reader of
# units would take 7m+2 for 7 m.
_NORMALIZATION = replace(LatexExtractionConfig().normalization_config, units=False)
_EXTRACTION = [LatexExtractionConfig(normalization_config=_NORMALIZATION)]

_LETTER = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")  # or a command, whose letters are none

bound_binomials()


def same_formula(truth: str, given: str, tolerance: Fraction = Fraction(0)) -> bool:
    """Whether two plain texts are equal formulas; those that cannot be read, or are too large to be evaluated, are not.

    `tolerance`: how far a number may be from the truth that stands for it rounded. What goes wrong in a comparison is raised.
    """
    if max(len(truth), len(given)) > LONGEST or too_deep(given) or too_deep(truth):
        return False
    ours, theirs = map(_parsed, _told_apart(truth, given))
    if ours is None or theirs is None or too_large(ours) or too_large(theirs):
        return False
    if (
        isinstance(ours, sympy.Expr)
        and isinstance(theirs, sympy.Expr)
        and (decided := _evaluated(ours, theirs, tolerance)) is not None
    ):
        return decided
    return bool(verify([ours], [theirs], allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    found = parse(f"${text}$", _EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _told_apart(*texts: str) -> list[str]:
    """The texts with another name for a capital letter whose small one is in them too: the parser takes R and r for one symbol."""
    letters = {letter for text in texts for letter in _LETTER.findall(text)}
    both = {letter for letter in letters if letter.isupper() and letter.lower() in letters}
    return [_LETTER.sub(lambda match: f"\\Xi_{{{ord(match[0])}}}" if match[0] in both else match[0], text) for text in texts]


def _evaluated(truth: sympy.Expr, given: sympy.Expr, tolerance: Fraction) -> bool | None:
    """Whether two expressions have the same values, at a few points if they have symbols; None if evaluation does not tell."""
    symbols = sorted(truth.free_symbols | given.free_symbols, key=str)
    if (
        truth.free_symbols != given.free_symbols
        or truth.has(sympy.oo, sympy.zoo, sympy.nan)
        or given.has(sympy.oo, sympy.zoo, sympy.nan)
    ):
        return None
    difference = _exact(truth) - _exact(given)
    rounding = sympy.Rational(tolerance.numerator, tolerance.denominator)
    told = []
    for k in range(len(POINTS) if symbols else 1):
        point = {symbol: POINTS[k] + i * STEP for i, symbol in enumerate(symbols)}
        distance, *terms = (
            abs(term.subs(point).evalf(PRECISION, maxn=MOST_PRECISION)) for term in (difference, *sympy.Add.make_args(difference))
        )
        if all(term.is_number and term.is_finite for term in (distance, *terms)):
            told.append(bool(distance <= max(ZERO * max(terms), rounding)))
    return all(told) if told else None


def _exact(expression: Any) -> Any:
    """The expression with whole numbers combined, and its decimal numbers as the fractions that they are."""
    if expression.is_Float:
        return sympy.Rational(str(expression))
    if not expression.args:
        return expression
    parts = [_exact(part) for part in expression.args]
    return parts[0] if isinstance(expression, sympy.UnevaluatedExpr) else expression.func(*parts)
