"""Final answers in mathematics: found where the prompt asked for them, compared as numbers, letters, lists, words or formulas."""

import contextlib
import json
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from serve.verifiers.answer_form import BY_CONVENTION, AnswerConfig, Wanted, extract
from serve.verifiers.formulas import LONGEST, same_formula
from serve.verifiers.plain_text import in_words, key, plain
from serve.verifiers.written_number import WrittenNumber, number_at, without_unit

OTHERS = ("boxed", "tag", "hash", "stated", "marked", "last_number")  # where answers stand that are not where they were asked for
MOST_ITEMS = 300  # of a list whose items are compared in any order

_CHOICE = re.compile(r"\(?\s*([A-J])\s*\)?")
_CHOSEN = re.compile(
    r"(?:option|choice|answer)?\s*(?:\(\s*([A-Ja-j])\s*\)|([A-J])(?=\s*(?:[.):,]|$|because|since|-)))", re.IGNORECASE
)
_ASSIGNED = re.compile(r"\s*([a-zA-Z]\w*|\\[a-z]+)((?:_\{?\w+\}?)?\s*(?:\([^()=]*\))?)\s*=(?!=)")
_DOTS = re.compile(r"\\dots|\.\.\.")


@dataclass(frozen=True)
class Truth:
    """A right answer: its plain text, and what kind of answer that is."""

    text: str
    wanted: Wanted
    number: WrittenNumber | None


def score(
    response: str, ground_truth: Any, extra_info: dict[str, Any], answer: AnswerConfig = BY_CONVENTION, convention: str = "boxed"
) -> float:
    """1.0 if the response's answer is right, else 0.0; of several truths (a list) any will do.

    Thinking is not searched, and thinking that has not ended holds no answer. ValueError for a truth that says nothing; what goes
    wrong inside a comparison is an error and no 0.
    """
    forms = answer.order(convention, OTHERS)
    return float(any(is_right(response, truth, answer, forms) for truth in truths_of(ground_truth)))


def is_right(response: str, truth: Truth, answer: AnswerConfig, forms: tuple[str, ...]) -> bool:
    """Whether the answer that a response gives in one of the forms is the truth."""
    found = extract(response, forms, truth.wanted)
    if found is None or len(found) > max(LONGEST, 2 * len(truth.text)):
        return False
    given, percent = plain(found), answer.percent == "fraction"
    if key(given) == key(truth.text):
        return True
    if truth.wanted.letter:
        return (match := _CHOSEN.match(given)) is not None and (match[1] or match[2]).upper() == _letter(truth.text)
    if truth.wanted.words:
        return key(given).casefold() == key(truth.text).casefold()
    if truth.number is not None:
        number = _number(given)
        return number.same(truth.number, percent) if number is not None else _same(truth.text, given, percent)
    return _same(truth.text, given, percent)


def why_unusable(ground_truth: Any, words: str) -> str | None:
    """Why nothing can be compared with a truth; None if it can. Words are refused unless they are to be compared as text."""
    try:
        truths = truths_of(ground_truth)
    except ValueError as error:
        return str(error)
    wordy = next((one for one in truths if one.wanted.words and " " in one.text), None)
    if wordy is None or words == "compare":
        return None
    shown = wordy.text[:60]
    return f"the truth {shown!r} is in words, of which no number is the answer: task.answer.words=compare compares them as text"


@lru_cache(maxsize=4096)
def _read(text: str) -> Truth:
    shown = plain(text.rpartition("####")[2])
    if not shown:
        raise ValueError(f"the truth {text[:60]!r} is blank")
    number = number_at(shown)
    if number is not None and not (number.ends_well and len(number.rest.split()) <= 3 and not re.search(r"[\d,\\]", number.rest)):
        number = None
    letter = _CHOICE.fullmatch(shown) is not None
    words = number is None and not letter and in_words(shown)
    several = number is None and not words and len(_parts(shown)[1]) > 1
    value = number is not None or (
        not (letter or words or several) and re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", shown)) is None
    )
    return Truth(shown, Wanted(value, letter, words, several), number)


def truths_of(ground_truth: Any) -> list[Truth]:
    """The acceptable answers: of a list any, of a GSM8K solution what follows `####`. ValueError if one is blank."""
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith('["'):
        with contextlib.suppress(ValueError):
            ground_truth = json.loads(ground_truth)
    several = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not several:
        raise ValueError("the list of truths is empty")
    for one in several:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            raise ValueError(f"the truth {one!r:.60} is neither text nor a number")
    return [_read(one if isinstance(one, str) else repr(one)) for one in several]


def _letter(text: str) -> str | None:
    match = _CHOICE.fullmatch(text)
    return match[1] if match else None


def _number(text: str) -> WrittenNumber | None:
    """The number that an answer is: at its beginning, or after its last equals sign."""
    before, _, last = re.sub(r"\\approx(?![a-z])|≈", "=", text).rpartition("=")
    for part in (text, "" if in_words(before) and re.search(r"\d", before) else last.strip()):
        number = number_at(part)
        if number is not None and number.ends_well and len(_parts(part)[1]) == 1:
            return number
    return None


def _same(truth: str, given: str, percent: bool) -> bool:
    """Whether two plain texts are the same value: the same items of a list, the same number, or equal formulas."""
    if key(truth) == key(given):
        return True
    (shape, items), (their_shape, theirs) = _parts(truth), _parts(given)
    if len(items) > 1 and len(theirs) > 1:
        return _shapes_agree(shape, their_shape, len(items)) and _same_items(shape, items, their_shape, theirs, percent)
    if len(items) > 1 or len(theirs) > 1:
        interval = (len(items) == 2 and shape != "") or (len(theirs) == 2 and their_shape != "")
        return interval and same_formula(truth, given)
    ours, other = items[0], theirs[0]
    names = [_ASSIGNED.match(one) for one in (ours, other)]
    if names[0] and names[1] and key(names[0].group()) != key(names[1].group()):
        return False
    ours, other = (one[name.end() :].strip() if name else one for one, name in zip((ours, other), names, strict=True))
    a, b = number_at(ours), number_at(other)
    if a is not None and b is not None and a.ends_well and b.ends_well:
        return a.same(b, percent)
    ours, other = without_unit(ours), without_unit(other)
    if key(ours) == key(other):
        return True
    return not in_words(ours) and not in_words(other) and same_formula(ours, other, max(_rounding(a), _rounding(b)))


def _rounding(number: WrittenNumber | None) -> Fraction:
    """How far from a value a decimal number may be that is written for it."""
    return number.rounding if number is not None and number.ends_well else Fraction(0)


def _shapes_agree(shape: str, theirs: str, count: int) -> bool:
    """Whether brackets may differ: those of intervals may not, and a list needs none."""
    if shape == theirs or "" in (shape, theirs):
        return True
    return count > 2 and {shape, theirs} <= {"()", "[]", "{}"}


def _same_items(shape: str, items: list[str], their_shape: str, theirs: list[str], percent: bool) -> bool:
    """Whether lists have the same items: in order if one is a tuple or leaves terms out, else in any order."""
    if len(items) != len(theirs):
        return False
    mixed = {shape, their_shape} & {"()", "(]", "[)"}
    if mixed or any(_DOTS.search(one) for one in (*items, *theirs)) or len(items) > MOST_ITEMS:
        return all(_same(one, other, percent) for one, other in zip(items, theirs, strict=True))
    left = list(theirs)
    for one in items:
        match = next((i for i, other in enumerate(left) if _same(one, other, percent)), None)
        if match is None:
            return False
        del left[match]
    return True


def _parts(text: str) -> tuple[str, list[str]]:
    """The brackets around a plain text, if they hold a list, and its items; a list needs no brackets."""
    text = re.sub(r"^\s*[a-zA-Z]\s*\\in(?![a-z])\s*", "", text)
    for opener, closer in (("\\{", "\\}"), *((a, b) for a in "([" for b in ")]")):
        if text.startswith(opener) and text.endswith(closer):
            items = _split(text[len(opener) : -len(closer)], bracketed=True)
            if items is not None and (len(items) > 1 or opener == "\\{"):
                return opener[-1] + closer[-1], items
    return "", _split(text, bracketed=False) or [text]


_MARKS = re.compile(r"\\[{}]|[()\[\]{}]|,|;|\s+(?:,\s*)?(?:and|or)\s+")


def _split(text: str, bracketed: bool) -> list[str] | None:
    """The items between separators that no bracket encloses; None if a bracket closes that was not opened.

    Commas without a space separate thousands where they can, but not within brackets that have no others.
    """
    depth, cuts = 0, list[tuple[int, int, bool]]()
    for match in _MARKS.finditer(text):
        mark = match.group()
        if mark[-1] in "([{":
            depth += 1
        elif mark[-1] in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0:
            thousands = mark == "," and re.search(r"(?<![\d.])\d{1,3}(?:,\d{3})*$", text[: match.start()]) is not None
            thousands = thousands and re.match(r"\d{3}(?!\d)", text[match.end() :]) is not None
            cuts.append((match.start(), match.end(), thousands))
    tight = bracketed and all(thousands for _, _, thousands in cuts)
    items, start = [], 0
    for first, last, thousands in cuts:
        if tight or not thousands:
            items.append(text[start:first])
            start = last
    items.append(text[start:])
    return [one for item in items if item.strip() for one in _signs(re.sub(r"^(?:and|or)\s+", "", item.strip()))]


def _signs(item: str) -> list[str]:
    """Both values of `a \\pm b`."""
    if item.count("\\pm") != 1:
        return [item]
    before, _, after = item.partition("\\pm")
    return [f"{before}+{after}" if before.strip() else after.strip(), f"{before}-{after.strip()}"]
