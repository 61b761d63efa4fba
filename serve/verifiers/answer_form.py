"""Where in a response its answer stands: in a box, after `####`, between tags, after "the answer is", or as the last number."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serve.verifiers.plain_text import in_words, plain
from serve.verifiers.written_number import NUMBER, number_at

LONGEST_LINE = 2_000  # characters of a line that is an answer by itself
LAST_NUMBER_IN = 20_000  # characters at the end of a response in which its last number is looked for


@dataclass(frozen=True)
class AnswerConfig:
    """Where answers stand and how they are compared; `conf/task/base.yaml` says what each key is."""

    form: str | None = None
    fallback: bool | None = None
    words: str = "refuse"
    percent: str = "sign"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("form", self.form, (None, *FORMS)),
            ("words", self.words, ("refuse", "compare")),
            ("percent", self.percent, ("sign", "fraction")),
        ):
            if value not in allowed:
                raise ValueError(f"task.answer.{name}={value}: use one of {', '.join(str(one or 'null') for one in allowed)}.")

    def order(self, convention: str, others: tuple[str, ...]) -> tuple[str, ...]:
        """The forms to look for, first to last: the given one, or the data source's and then others."""
        first = self.form or convention
        falls_back = self.form is None if self.fallback is None else self.fallback
        return (first, *(one for one in others if one != first)) if falls_back else (first,)


@dataclass(frozen=True)
class Wanted:
    """What the truth is, as far as finding an answer needs it: a number, a letter, words, or several values."""

    number: bool = False
    letter: bool = False
    words: bool = False
    several: bool = False


def after_thinking(response: str) -> str | None:
    """What follows `</think>`, or the whole response where nobody thinks; None while the thinking has not ended."""
    final = response.rpartition("</think>")[2]
    return None if "<think>" in final else final


def extract(response: str, forms: tuple[str, ...], wanted: Wanted) -> str | None:
    """The answer's text in the first of the forms that the response has; None if it has none of them."""
    final = after_thinking(response)
    if final is None:
        return None
    return next((found for form in forms if (found := FORMS[form](final, wanted)) is not None), None)


def _boxed(text: str, wanted: Wanted) -> str | None:
    """The last box; boxes that only "or" stands between are alternatives, and of several values those with "and" or a comma."""
    joint = r"\s*[$.]*\s*(?:,?\s*or|,|,?\s*and)\s*[$]*\s*" if wanted.several else r"\s*[$]*\s*,?\s*or\s*[$]*\s*"
    joined: list[str] = []
    before = 0
    for start, end, content in _boxes(text):
        joined = [*joined, content] if joined and re.fullmatch(joint, text[before:start]) else [content]
        before = end
    return ", ".join(joined) if joined else None


_BOX, _BARE, _BRACE = re.compile(r"\\f?boxed\s*"), re.compile(r"[^\s{}$\\]"), re.compile(r"\\[{}]|[{}]")


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of every closed box, the outer ones of those within one another."""
    position = 0
    while match := _BOX.search(text, position):
        start, position = match.start(), match.end()
        if text[position : position + 1] == "{":
            end = _closing(text, position)
            if end is None:
                continue
            yield start, end + 1, text[position + 1 : end]
            position = end + 1
        elif number := _BARE.match(text, position):
            yield start, number.end(), number.group()


def _closing(text: str, start: int) -> int | None:
    """Where the brace at `start` is closed, if it is."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def _hash(text: str, wanted: Wanted) -> str | None:
    """What follows the first `####` on its line: for a number the first that a number follows, and no more than that number."""
    lines = [line.strip() for line in re.findall(r"####[ \t]*([^\n]*)", text)]
    if wanted.number:
        for shown in map(plain, lines):
            if (number := number_at(shown)) and number.stands:
                return shown.removesuffix(number.rest)
    return lines[0].partition("####")[0].strip() if lines else None


def _tag(text: str, wanted: Wanted) -> str | None:
    head, found, _ = text.rpartition("</answer>")
    start = head.rfind("<answer>") if found else -1
    return None if start < 0 else head[start + len("<answer>") :].strip()


_STATED = re.compile(r"(?:answer|solution)s?\s*(?:\*\*|__)?\s*(?:is|are|:|=)\s*:?[ \t]*(?:\*\*|__)?\s*", re.IGNORECASE)


def _stated(text: str, wanted: Wanted) -> str | None:
    """What follows the last "answer is" or "answer:"."""
    start = next((match.end() for match in reversed(list(_STATED.finditer(text)))), None)
    if start is None:
        return None
    rest = re.split(r"\n[ \t]*\n", text[start : start + LONGEST_LINE], maxsplit=1)[0].strip()
    if wanted.words:
        return rest or None
    rest = _leading_math(rest) or re.split(r"[.!?](?=\s+[A-Z])|\n", rest, maxsplit=1)[0].removesuffix("**")
    shown = plain(rest)
    if not wanted.letter and in_words(shown) and not (number_at(shown) or "=" in rest):
        return None  # it only leads to the answer: "the solution is as follows"
    return rest or None


def _leading_math(text: str) -> str | None:
    """The formulas at the beginning, with those that a comma, "and" or "or" joins to them."""
    formula = r"(?:\$\$[^$]+\$\$|\$[^$\n]+\$|\\\((?:[^\\]|\\(?!\)))+\\\)|\\\[(?:[^\\]|\\(?!\]))+\\\])"
    match = re.match(rf"{formula}(?:\s*(?:,?\s*and|,?\s*or|,)\s*{formula})*(?:\s*(?:\\?%|°|percent|degrees?))?", text)
    return match.group() if match else None


_OPENERS = {"$": "$", "**": "**", "\\(": "\\)", "\\[": "\\]", "`": "`", "__": "__"}


def _marked(text: str, wanted: Wanted) -> str | None:
    """The end of the text if it is one formula or bold whole; else the last formula or bold piece."""
    lines = [line.strip() for line in text.strip().splitlines()]
    tail = re.split(r"\n[ \t]*\n", text.strip())[-1].strip() if text.strip() else ""
    for whole in (tail, lines[-1] if lines else ""):
        bare = whole.rstrip(".")
        for opener, closer in _OPENERS.items():
            if len(bare) <= LONGEST_LINE and bare.startswith(opener) and bare.endswith(closer) and len(bare) > 2 * len(opener):
                return bare[len(opener) : -len(closer)]
    pieces = r"\*\*([^*\n]+)\*\*|(?<![\\\d])\$\$?(?!\s)([^$\n]+?)(?<![\s\\])\$\$?(?!\d)|\\\(((?:[^\\\n]|\\(?!\)))+)\\\)"
    found = [next(group for group in match.groups() if group) for match in re.finditer(pieces, text)]
    if wanted.number:
        found = [piece for piece in found if number_at(plain(piece)) or "=" in piece or "\\" in piece]
    return found[-1] if found else None


def _last_number(text: str, wanted: Wanted) -> str | None:
    """The last line if it is a formula, else the last number as people write it; of other answers the letter, or the last line."""
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)
    if wanted.letter and (letters := re.findall(r"\(([A-J])\)", text)):
        return letters[-1]
    if line is None or not wanted.number or not in_words(plain(line[:LONGEST_LINE])):
        return line
    text = plain(text[-LAST_NUMBER_IN:])
    found = [
        match.group() for match in NUMBER.finditer(text) if match.group()[:1].isspace() or not text[: match.start()][-1:].isalnum()
    ]
    return found[-1].strip() if found else None


def _whole(text: str, wanted: Wanted) -> str | None:
    return text.strip() or None


FORMS: dict[str, Callable[[str, Wanted], str | None]] = {
    "boxed": _boxed,
    "hash": _hash,
    "tag": _tag,
    "stated": _stated,
    "marked": _marked,
    "last_number": _last_number,
    "whole": _whole,
}

BY_CONVENTION = AnswerConfig()
