"""Which answers may reach a scorer that evaluates text: reasoning-gym's `eval` and SymPy's `parse_expr` run what they read.

Each of these datasets takes answers of one kind, and only text of that kind is let through. Anything else is as wrong as no answer.
The sandbox stands behind this; the audit in `tests/hostile/` sends a canary to every dataset.
"""

import ast
import re
from collections.abc import Callable

LONGEST = 20_000  # characters
DEEPEST = 60  # nested operations
LARGEST_EXPONENT = 64
LONGEST_NUMBER = 30  # digits

FUNCTIONS = frozenset(["sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh", "asin", "acos", "atan"])
FUNCTIONS |= {"exp", "log", "ln", "sqrt", "Abs", "erf", "Rational"}
CONSTANTS = frozenset(["pi", "alpha", "beta", "gamma", "theta", "phi", "lambda_", "mu"])


def arithmetic(text: str) -> str | None:
    """Numbers and the four operations; the reason if it is anything else."""
    if not re.fullmatch(r"[\d\s.+\-*/()]*", text, re.ASCII):
        return "only numbers, + - * / and parentheses"
    if re.search(r"\*\s*\*", text) or re.search(r"//", text):
        return "only numbers, + - * / and parentheses"
    return "a number is too long" if re.search(rf"\d{{{LONGEST_NUMBER},}}", text) else None


def expression(text: str) -> str | None:
    """A formula in one-letter variables with elementary functions and bounded exponents; the reason if it is anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "not a formula"
    return _formula(tree.body, 0)


def _formula(node: ast.expr, depth: int) -> str | None:
    if depth > DEEPEST:
        return "too deeply nested"
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
            return "a number is too long" if len(str(value)) > LONGEST_NUMBER else None
        case ast.Name(id=name):
            return None if len(name) == 1 or name in CONSTANTS else f"no name {name[:20]}"
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _formula(operand, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _exponent(right) or _formula(left, depth + 1) or _formula(right, depth + 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _formula(left, depth + 1) or _formula(right, depth + 1)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if name in FUNCTIONS:
            return next((reason for one in arguments if (reason := _formula(one, depth + 1))), None)
    return "not a formula"


def _exponent(node: ast.expr) -> str | None:
    """An exponent without numbers that are too large, and with no power or product of numbers inside it, which can be any size."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, int | float) and abs(inner.value) > LARGEST_EXPONENT:
            return "an exponent is too large"
        grows = isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Pow | ast.Mult)
        if grows and not any(isinstance(one, ast.Name) for one in ast.walk(inner)):
            return "a tower or a product of numbers in an exponent"
    return None


def literal(text: str) -> str | None:
    """Lists of words and numbers, or text that is no Python at all (which `eval` refuses); the reason if it would be evaluated."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    plain = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.UnaryOp, ast.USub, ast.Load)
    return None if all(isinstance(node, plain) for node in ast.walk(tree)) else "only lists of words and numbers"


GUARDS: dict[str, Callable[[str], str | None]] = {
    "countdown": arithmetic,
    "puzzle24": arithmetic,
    "simple_integration": expression,
    "intermediate_integration": expression,
    "polynomial_multiplication": expression,
    "binary_matrix": literal,
    "n_queens": literal,
    "spiral_matrix": literal,
    "string_insertion": literal,
}


def refused(dataset: str, answer: str) -> str | None:
    """Why an answer may not reach the scorer of a reasoning-gym dataset; None if it may."""
    if dataset not in GUARDS:
        return None
    return f"longer than {LONGEST} characters" if len(answer) > LONGEST else GUARDS[dataset](answer)
