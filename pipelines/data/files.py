"""Rows of files, at a path or behind any fsspec URL."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow.parquet as pq

GZIP = b"\x1f\x8b"
SURROGATES = ("\\ud", "\\uD")  # only escapes can write half a character
LONGEST_FIELD = 1 << 30  # characters of a CSV field


class DataError(ValueError):
    """A dataset that cannot be used; the message names file, row and column."""


def read_rows(file: str) -> list[dict[str, Any]]:
    """All rows of a Parquet, JSON, JSONL or CSV file (gzip or not) at a path or fsspec URL; DataError says what is wrong."""
    path = PurePosixPath(file.partition("?")[0])
    suffix = PurePosixPath(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix not in READERS:
        raise DataError(f"{file}: only {', '.join(READERS)} files are read, also as .gz.")
    try:
        with fsspec.open(file, "rb") as stream:
            content = stream.read()
        rows = READERS[suffix](file, gzip.decompress(content) if content.startswith(GZIP) else content)
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


def _text(file: str, content: bytes) -> str:
    """UTF-8 text, with a byte-order mark or without; DataError names another encoding."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:64]:
        raise DataError(f"{file}: it is UTF-16 or UTF-32; save it as UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = content[: error.start].count(b"\n")
        raise DataError(f"{file}, row {row}: byte {error.start} is no UTF-8; save the file as UTF-8.") from None


def _read_json(file: str, content: bytes) -> list[dict[str, Any]]:
    """An object per line, or one array of objects."""
    text = _text(file, content)
    escaped = any(escape in text for escape in SURROGATES)
    if text.lstrip().startswith("["):
        found = list(enumerate(_parsed(file, text)))
    else:
        found = [(i, _parsed(f"{file}, row {i}", line)) for i, line in enumerate(text.split("\n")) if line.strip()]
    for i, row in found:
        if not isinstance(row, dict):
            raise DataError(f"{file}, row {i}: expected an object, found {type(row).__name__}.")
        for column, value in row.items() if escaped else ():
            if (at := _unwritable(value)) is not None:
                raise DataError(f"{file}, row {i}, column {column!r}: {at!r} holds half a character (a lone surrogate).")
    return [row for _, row in found]


def _parsed(where: str, text: str) -> Any:
    """A JSON value; DataError for what parsers read in different ways: a key twice, NaN, infinity."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise DataError(f"{where}: the key {twice!r} is there twice.")
        return found

    def refuse(name: str) -> Any:
        raise DataError(f"{where}: {name} is no JSON number; leave the value out or write null.")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except DataError:
        raise
    except RecursionError:
        raise DataError(f"{where}: it is nested too deeply.") from None
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error}).") from error


def _read_csv(file: str, content: bytes) -> list[dict[str, Any]]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(io.StringIO(_text(file, content), newline=""), strict=True)
    header, *rows = [row for row in reader if row] or [[]]
    if len(set(header)) < len(header):
        twice = next(name for i, name in enumerate(header) if name in header[:i])
        raise DataError(f"{file}: the column {twice!r} is there twice.")
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise DataError(f"{file}, row {i}: {len(row)} fields, but the header has {len(header)}.")
    return [dict(zip(header, row, strict=True)) for row in rows]


def _unwritable(value: Any) -> str | None:
    """The first text in a value that cannot be written as UTF-8."""
    for text in _texts(value):
        try:
            text.encode()
        except UnicodeEncodeError:
            return text[:40]
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (key, *_texts(inner)) if isinstance(key, str) else _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


READERS: dict[str, Callable[[str, bytes], list[dict[str, Any]]]] = {
    ".parquet": lambda _, content: pq.read_table(io.BytesIO(content)).to_pylist(),
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
}
