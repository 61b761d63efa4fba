"""Answers that were paid for, on disk: one file for each question, so that judges on any file system may share them."""

import hashlib
import json
from pathlib import Path
from typing import Any


class AnswerCache:
    """Answers by the content of their question."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def key(question: dict[str, Any]) -> str:
        """The digest of all that decides an answer."""
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> dict[str, Any] | None:
        """An answer, or None; a file that is damaged is none."""
        try:
            return json.loads(self._file(key).read_text())
        except (OSError, ValueError):
            return None

    def put(self, key: str, answer: dict[str, Any]) -> None:
        """Keep an answer, whole or not at all."""
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{id(answer)}.part")
        part.write_text(json.dumps(answer))
        part.replace(file)

    def _file(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
