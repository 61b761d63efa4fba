"""A file of JSON records that is only ever appended to, and a mark of how far somebody has read it; both survive a torn write."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Records a line each, readable by their user alone."""

    def __init__(self, records: Path, mark: Path) -> None:
        self.records, self.mark = records, mark
        self.torn: list[str] = []  # what was no record, by place
        self._lock = threading.Lock()

    def begun(self) -> bool:
        """Whether there is a record."""
        return self.records.exists() and self.records.stat().st_size > 0

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; it is in the file when this returns. One that was cut short before it stays a line of its own."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        with self._lock, os.fdopen(os.open(self.records, flags, 0o600), "rb+", buffering=0) as stream:
            size = stream.seek(0, os.SEEK_END)
            if size:
                stream.seek(size - 1)
                if stream.read(1) != b"\n":
                    stream.write(b"\n")
            stream.write(json.dumps(record, default=str).encode() + b"\n")

    def after(self, position: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Whole records behind a position, each with the position after it; what is none is noted in `torn` and passed over."""
        if not self.records.exists():
            return
        with self._lock, open(self.records, "rb") as stream:
            stream.seek(position)
            lines = stream.readlines()
        for line in lines:
            if not line.endswith(b"\n"):
                return  # it is being written
            try:
                record = json.loads(line)
                whole = isinstance(record, dict) and "kind" in record
            except ValueError:
                whole = False
            if whole:
                yield position + len(line), record
            elif (note := f"{self.records.name} at byte {position}: cut short, skipped") not in self.torn:
                self.torn.append(note)
            position += len(line)

    def marked(self) -> int | None:
        """How far it has been read; None where the mark is empty, torn or beyond the file."""
        if not self.mark.exists():
            return 0
        text = self.mark.read_text().strip()
        size = self.records.stat().st_size if self.records.exists() else 0
        return int(text) if text.isascii() and text.isdigit() and int(text) <= size else None

    def set_mark(self, position: int) -> None:
        """Remember how far it has been read."""
        temporary = self.mark.with_name(self.mark.name + ".tmp")
        temporary.write_text(str(position))
        temporary.chmod(0o600)
        os.replace(temporary, self.mark)
