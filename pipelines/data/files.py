"""Rows of files, at a path or behind any fsspec URL."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow.parquet as pq


class DataError(ValueError):
    """A dataset that cannot be used; the message names file, row and column."""


def read_rows(file: str) -> list[dict[str, Any]]:
    """All rows of a Parquet, JSONL or CSV file at a path or fsspec URL; DataError if it is missing, empty or malformed."""
    suffix = PurePosixPath(file.partition("?")[0]).suffix
    if suffix not in READERS:
        raise DataError(f"{file}: only {', '.join(READERS)} files are read.")
    try:
        with fsspec.open(file, "rb") as stream:
            rows = READERS[suffix](file, stream)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{file}: no such file.") from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file}: not a readable {suffix} file ({reason}).") from error
    if not rows:
        raise DataError(f"{file}: the file has no rows.")
    return rows


def _read_jsonl(file: str, stream: Any) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(stream):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}, row {number}: not valid JSON ({error}).") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}, row {number}: expected an object, found {type(row).__name__}.")
        rows.append(row)
    return rows


READERS: dict[str, Callable[[str, Any], list[dict[str, Any]]]] = {
    ".parquet": lambda _, stream: pq.read_table(stream).to_pylist(),
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".csv": lambda _, stream: list(csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8", newline=""))),
}
