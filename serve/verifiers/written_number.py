"""Numbers as people write them, read exactly: with separators, fractions, powers of ten, percent, currency and units."""

# ruff: noqa: SIM905  tables of words read as lines

import re
from dataclasses import dataclass
from fractions import Fraction

MOST_DIGITS = 4_000  # of a number that is read as one
SIGNIFICANT = 6  # digits from which on a decimal number may stand for the value that it rounds

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"(?:[eE][+-]?\d+|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+))"
NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s?(?:[€£¥₹]|US)?\s?(?:"
    rf"(?P<whole>\d+)(?:\s+(?P<up>\d+)\s*/\s*(?P<down>\d+)(?![\d.])|\s*\\frac\s*\{{\s*(?P<lup>\d+)\s*\}}\s*\{{\s*(?P<ldown>\d+)\s*\}})"
    rf"|\\frac\s*\{{\s*(?P<fsign>-?)\s*(?P<fup>{_DIGITS})\s*\}}\s*\{{\s*(?P<fdown>{_DIGITS})\s*\}}"
    rf"|(?P<value>{_DIGITS})(?P<power>{_POWER})?(?:\s*/\s*(?P<over>{_DIGITS})(?!\s*[/^!\d]))?"
    r")(?P<unit>\s*(?:%|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\circ(?![a-zA-Z])))?"
)
_SPACED = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")  # thousands, where nothing else is written
_PERCENT = re.compile(r"\s*(?:percent|per cent|percentage points?|pct)(?![a-z])", re.IGNORECASE)
_MULTIPLES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NOT_UNITS = frozenset(
    (
        "if otherwise unless when whenever where or and to times plus minus mod modulo more less than divided over squared cubed "
        "factorial of is are for dozen hundred power multiples through choose"
    ).split()
)
_CONDITIONS = re.compile(r"\b(?:if|otherwise|unless|when|whenever)\b|\b(?:and|or)\s+[-\d\\]", re.IGNORECASE)
# A word after a space, or a unit of several letters; then an exponent or "per", and nothing that goes on calculating.
_AFTER = re.compile(
    r"(?:\s+\(?|(?=(?:cm|mm|km|kg|ml|mL|min|rad|deg|ft|mi|hours?|days?)(?![a-z])))([A-Za-z]+)(?:\s*\^\s*\{?[23]\}?)?"
    r"(?:\s*/\s*[a-z]+(?:\s*\^\s*\{?2\}?)?)?(?:[.,;:!?)'\"]|\s(?!\s*[-+*/=^<>\\]\s*[\w\\(])|$)"
)
_LEADING = re.compile(
    r"(?:about|approximately|roughly|exactly|only|just|a total of|equal to|equals|is|=|\\approx|≈|~)\s*", re.IGNORECASE
)
# One name for every spelling of a unit that another could be mistaken for.
_UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "in": "inch inches",
        "ft": "ft foot feet",
        "mi": "mi mile miles",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "s": "s sec secs second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "d": "day days",
        "l": "l L liter liters litre litres",
        "ml": "ml mL milliliter milliliters",
        "rad": "rad radian radians",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True)
class WrittenNumber:
    """A number at the beginning of a text, and what stands after it."""

    value: Fraction
    significant: int  # digits, of a number with a decimal point; 0 for one without
    places: int  # digits after the point
    percent: bool
    rest: str

    @property
    def ends_well(self) -> bool:
        """Whether what follows the number leaves it the number that it is: nothing, a unit, or words that set no condition."""
        if not self.rest:
            return True
        return self.stands and not _CONDITIONS.search(self.rest)

    @property
    def stands(self) -> bool:
        """Whether it ends where it ends: a sentence does, or a unit or a word follows that does not calculate with it."""
        if not self.rest or re.match(r"[.,;:?]\s", self.rest):
            return True
        word = _AFTER.match(self.rest)
        if word is None or (len(word[1]) == 1 and word[1] not in _UNITS and not re.match(r"\s+a\s+[a-z]{2}", self.rest)):
            return False
        return word[1].lower() not in _NOT_UNITS

    @property
    def unit(self) -> str | None:
        """The unit that stands after it, if it is a known one."""
        word = re.match(r"\s*([A-Za-z]+)", self.rest)
        return _UNITS.get(word[1]) if word else None

    @property
    def rounding(self) -> Fraction:
        """How far it may be from the value that it stands for: half its last place, from six digits on."""
        return Fraction(1, 2 * 10**self.places) if self.significant >= SIGNIFICANT else Fraction(0)

    def same(self, other: "WrittenNumber", percent_is_fraction: bool) -> bool:
        """Whether two written numbers mean the same; a decimal number of six or more digits may be the other one rounded."""
        if None not in (self.unit, other.unit) and self.unit != other.unit:
            return False
        a, b = (one.value / 100 if percent_is_fraction and one.percent else one.value for one in (self, other))
        return abs(a - b) <= max(self.rounding, other.rounding)


def number_at(text: str) -> WrittenNumber | None:
    """The number that a plain text begins with, exactly; None if it begins with none."""
    text = text[match.end() :] if (match := _LEADING.match(text)) else text
    text = text.replace(" ", "") if _SPACED.fullmatch(text) else text
    match = NUMBER.match(text)
    if match is None or len(match.group()) > MOST_DIGITS:
        return None
    value, decimals = _value(match), match["value"] or ""
    if value is None:
        return None
    rest = text[match.end() :]
    percent = "%" in (match["unit"] or "")
    if not percent and (spelled := _PERCENT.match(rest)):
        percent, rest = True, rest[spelled.end() :]
    if (word := re.match(r"\s*([a-z]+)", rest)) and word[1] in _MULTIPLES:
        value, rest = value * _MULTIPLES[word[1]], rest[word.end() :]
    exact = "." not in decimals or bool(match["power"] or match["over"])
    digits = decimals.replace(",", "").replace(".", "").lstrip("0")
    places = len(decimals.partition(".")[2])
    return WrittenNumber(value, 0 if exact else len(digits), places, percent, rest)


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if match["sign"] == "-" else 1
    try:
        if match["whole"]:
            part = Fraction(int(match["up"] or match["lup"]), int(match["down"] or match["ldown"]))
            return sign * (int(match["whole"]) + part)
        if match["fup"]:
            fraction = _decimal(match["fup"]) / _decimal(match["fdown"])
            return sign * (-fraction if match["fsign"] else fraction)
        value = _decimal(match["value"])
        if match["power"]:
            exponent = int(re.findall(r"[+-]?\d+", match["power"])[-1])
            if abs(exponent) > MOST_DIGITS:
                return None
            value *= Fraction(10) ** exponent
        return sign * (value / _decimal(match["over"]) if match["over"] else value)
    except ZeroDivisionError:
        return None


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def without_unit(text: str) -> str:
    """A formula without the unit of several letters that stands after it."""
    match = re.search(r"\s([a-zA-Z]{2,})(?:\s*\^\s*\{?[23]\}?)?$", text)
    return text[: match.start()] if match and match[1] in _UNITS else text
