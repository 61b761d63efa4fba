"""JSON that keeps the types which rows may hold: tuples, sets, times, exact numbers, bytes, and mappings whose keys are no text."""

import base64
import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MARK = "$"  # the first character of a mark: {"$tuple": [1, 2]}

_WRITERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("tuple", list),
    set: ("set", lambda value: sorted(value, key=repr)),
    frozenset: ("frozenset", lambda value: sorted(value, key=repr)),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    datetime.datetime: ("datetime", datetime.datetime.isoformat),
    datetime.date: ("date", datetime.date.isoformat),
    datetime.time: ("time", datetime.time.isoformat),
    datetime.timedelta: ("timedelta", datetime.timedelta.total_seconds),
    Decimal: ("decimal", str),
    Fraction: ("fraction", str),
    complex: ("complex", lambda value: [value.real, value.imag]),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytes": base64.b64decode,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda seconds: datetime.timedelta(seconds=seconds),
    "decimal": Decimal,
    "fraction": Fraction,
    "complex": lambda parts: complex(*parts),
    "dict": dict,
}


def dumps(value: Any) -> str:
    """The value as JSON; TypeError names a type that it has no way to keep, ValueError is a number that JSON does not have."""
    return json.dumps(marked(value), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """What `dumps` was given."""
    return restored(json.loads(text))


def marked(value: Any) -> Any:
    """The value in JSON's types, others under a mark; numpy's arrays and numbers become lists and numbers."""
    if value is None or isinstance(value, str | bool):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not _looks_marked(value):
            return {key: marked(inner) for key, inner in value.items()}
        return {f"{MARK}dict": [[marked(key), marked(inner)] for key, inner in value.items()]}
    if isinstance(value, list):
        return [marked(inner) for inner in value]
    if type(value) in (int, float):
        return value
    for kind, (name, write) in _WRITERS.items():
        if isinstance(value, kind):
            return {f"{MARK}{name}": marked(write(value))}
    if hasattr(value, "tolist"):
        return marked(value.tolist())
    if isinstance(value, int | float):  # enumerations
        return marked(int(value) if isinstance(value, int) else float(value))
    raise TypeError(f"a value of type {type(value).__name__} cannot be kept")


def restored(value: Any) -> Any:
    """JSON's types as they were before `marked`."""
    if isinstance(value, list):
        return [restored(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if _looks_marked(value):
        ((mark, inner),) = value.items()
        if (read := _READERS.get(mark.removeprefix(MARK))) is not None:
            return read(restored(inner))
    return {key: restored(inner) for key, inner in value.items()}


def _looks_marked(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith(MARK)
