"""Typed settings from a composed mapping, with the key named in every error."""

import dataclasses
import math
import re
from difflib import get_close_matches
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says which key and what to do."""


def make(kind: type[T], values: dict[str, Any], where: str) -> T:
    """A dataclass from a mapping; ConfigError names what is missing, unknown or of another type."""
    fields = {field.name: field for field in dataclasses.fields(cast(Any, kind))}
    hints = get_type_hints(kind)
    if unknown := sorted(set(values) - set(fields)):
        near = get_close_matches(unknown[0], fields, n=3, cutoff=0.5)
        raise ConfigError(f"{where}.{unknown[0]}: no such key" + (f"; did you mean {', '.join(near)}?" if near else "."))
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise ConfigError(f"{where}.{missing[0]}: no value given.")
    values = {
        name: make(inner, value, f"{where}.{name}") if isinstance(value, dict) and (inner := _nested(hints[name])) else value
        for name, value in values.items()
    }
    for name, value in values.items():
        check_type(f"{where}.{name}", value, str(fields[name].type))
        check_bounds(kind, name, value, f"{where}.{name}")
    return kind(
        **{name: tuple(value) if isinstance(value, list) and _is_tuple(hints[name]) else value for name, value in values.items()}
    )


def bounds_of(kind: type) -> dict[str, tuple[float, float]]:
    """The least and greatest value of each number of a dataclass: its `BOUNDS`, and those of the classes that it builds on."""
    return {name: bounds for one in reversed(kind.__mro__) for name, bounds in vars(one).get("BOUNDS", {}).items()}


def check_bounds(kind: type, name: str, value: Any, where: str) -> None:
    """ConfigError where a number, or one of a list, is not finite or beyond the bounds of its field."""
    listed = isinstance(value, list | tuple)
    numbers = [one for one in (value if listed else [value]) if isinstance(one, int | float)]
    bounds = bounds_of(kind)
    if name in bounds and listed and len(numbers) < len(value):
        raise ConfigError(f"{where}={list(value)}: expected numbers.")
    low, high = bounds.get(name, (-math.inf, math.inf))
    for number in numbers:
        if isinstance(number, bool):
            continue
        if not math.isfinite(number):
            raise ConfigError(f"{where}={number}: must be a finite number.")
        if number < low:
            raise ConfigError(f"{where}={number}: must be {'above 0' if 0 < low < 1e-6 else f'at least {low:g}'}.")
        if number > high:
            raise ConfigError(f"{where}={number}: must be at most {high:g}.")


def _is_tuple(hint: Any) -> bool:
    return any(get_origin(one) is tuple for one in (hint, *get_args(hint)))


def _nested(hint: Any) -> Any:
    """The dataclass among the alternatives of a type, if there is one."""
    return next((one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one)), None)


_SCALARS = {"int": int, "float": (int, float), "str": str, "bool": bool}


def check_type(where: str, value: Any, declared: str) -> None:
    declared = re.sub(r"<class '(\w+)'>", r"\1", declared)
    if value is None and "None" in declared:
        return
    parts = [part for part in declared.replace(" ", "").split("|") if part != "None"]
    if not all(part in _SCALARS for part in parts):
        return
    kinds = [_SCALARS[part] for part in parts]
    plain = tuple(k for kind in kinds for k in (kind if isinstance(kind, tuple) else (kind,)))
    if not isinstance(value, plain) or (isinstance(value, bool) and bool not in plain):
        raise ConfigError(f"{where}={value}: expected {declared}.")
