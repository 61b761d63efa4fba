"""One plain text for the many ways in which people and models write the same answer."""

# ruff: noqa: RUF001, SIM905  characters that look like others are what this is about; tables of words read as lines

import re

_GREEK = "alpha beta gamma delta epsilon theta lambda mu rho sigma phi omega".split()
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d\u207b", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2007\u2006\u2005\u2008\u200a", "\u2009"),
        **dict.fromkeys("\u200b\u200c\u200d\ufeff\u2060\u00ad", ""),
        **dict.fromkeys("\u201c\u201d\u2018\u2019", "'"),
        **{"×": "\\times ", "÷": "/", "·": "\\cdot ", "⋅": "\\cdot ", "∗": "*", "⁄": "/", "∕": "/", "′": "'"},
        **{"π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∪": "\\cup ", "∩": "\\cap "},
        **{"∈": "\\in ", "∅": "\\emptyset ", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℝ": "\\mathbb{R}", "ℚ": "\\mathbb{Q}"},
        **{"…": "\\dots ", "⋯": "\\dots ", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil "},
        **{"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "⅛": " 1/8", "％": "%", "，": ", ", "．": "."},
        **{mark: f"^{{{i}}}" for i, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
        **{mark: f"_{{{i}}}" for i, mark in enumerate("₀₁₂₃₄₅₆₇₈₉")},
        **{chr(0xFF10 + i): str(i) for i in range(10)},
        **{letter: f"\\{name} " for letter, name in zip("αβγδεθλμρσφω", _GREEK, strict=True)},
    }
)
_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3})((?:(?:,?\\[,;:! ]|~|\{,\}|\u2009)\d{3})+)(?!\d)")
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|[\s\u2009]")
_MARKUP = re.compile(r"\*\*|__|`|\$|(?<!\\)\\[()\[\]]|\\(?:displaystyle|left|right|big|Big|bigl|bigr|limits)(?![a-zA-Z])")
_WRAPPED = re.compile(r"\\(text|mbox|textrm|textbf|textit|mathrm|mathbf|mathit|operatorname|rm|bf|hbox|f?boxed)\s*\{([^{}]*)\}")
_REPEATING = re.compile(r"(\d{1,30})\.(\d{0,30})\\(?:overline|dot|bar)\s*\{?(\d{1,30})\}?")
_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}(?![a-zA-Z])")
_NAMED = frozenset(
    (
        "sin cos tan sec csc cot sinh cosh tanh asin acos atan arcsin arccos arctan log exp gcd lcm max min mod sgn det deg arg and"
    ).split()
)
_SHORT_WORDS = frozenset("if is of in to on at by as no an he it we so".split())
_NAMES = {
    "dfrac": "frac",
    "tfrac": "frac",
    "cfrac": "frac",
    "ldots": "dots",
    "cdots": "dots",
    "dotsc": "dots",
    "leq": "le",
    "geq": "ge",
    "leqslant": "le",
    "geqslant": "ge",
    "neq": "ne",
    "lbrace": "{",
    "rbrace": "}",
    "varnothing": "emptyset",
    "lor": "text{ or }",
    "vee": "text{ or }",
    "land": "text{ and }",
    "degree": "circ",
    "lvert": "|",
    "rvert": "|",
    "thinspace": ",",
}
_RENAMED = re.compile(rf"\\({'|'.join(_NAMES)})(?![a-zA-Z])")
_ASCII = (
    (re.compile(r"\*\*"), "^"),
    (re.compile(r">="), "\\\\ge "),
    (re.compile(r"<="), "\\\\le "),
    (re.compile(r"(?<=\s)!=(?!=)"), "\\\\ne "),  # 5!=120 is a factorial
    (re.compile(r"(?<![a-zA-Z\\])(pi|infty)(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"(?<![a-zA-Z\\])(?:infinity|inf)(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![a-zA-Z\\])sqrt\s*(\d+)"), r"\\sqrt{\1}"),
)


def plain(text: str) -> str:
    """A text without markup, in one way of writing: no dollars or bold, LaTeX spacing as spaces, thousands without separators."""
    text = re.sub(r"(?<=[\w)}\]])\s*\*\*\s*(?=[\w({])", "^", text)  # a power and not bold
    text = text.translate(_CHARACTERS)
    text = _RENAMED.sub(lambda match: f"\\{_NAMES[match[1]]}" if _NAMES[match[1]] != "|" else "|", text)
    text = _THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = re.sub(r"\\%", "%", re.sub(r"(\\left|\\right)\\([{}])", r"\\\2", text))
    text = re.sub(r"\\\$", "", text)
    text = _MARKUP.sub(" ", text)
    for _ in range(4):
        text, changed = _WRAPPED.subn(lambda match: match[2] if match[2] in ("e", "i", "d") else f" {match[2]} ", text)
        if not changed:
            break
    text = _SPACES.sub(" ", text)
    for pattern, replacement in _ASCII:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = _REPEATING.sub(_as_fraction, re.sub(r"\s+", " ", text).strip())
    return text.strip("\"' ").rstrip(".,;: ").strip("\"' ")


def _as_fraction(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    whole, fixed, period = match.groups()
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    return f"{int(whole + fixed + period) - int(whole + fixed)}/{below}"


def in_words(shown: str) -> bool:
    """Whether a plain text says something in words, and is no formula."""
    words = _WORD.findall(re.sub(r"[_^]\s*\{[^{}]*\}", "", shown))
    return any(word not in _NAMED if len(word) > 2 else word in _SHORT_WORDS for word in words)


def key(text: str) -> str:
    """A plain text without the spaces that mean nothing: what is written the same has the same key."""
    text = re.sub(r"\{(\w)\}", r"\1", text)
    return re.sub(r"\s*([^\w\s])\s*", r"\1", text)
