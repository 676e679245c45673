"""Answers compared as they are written: texts, and numbers in their usual forms. Microseconds, no algebra."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 60  # of one number; longer ones are not read here
_CHARACTERS = {0xFF10 + d: str(d) for d in range(10)} | str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\uff05": "%",
     "\uff0e": ".", "\uff0f": "/", "\u2044": "/", "\u00b0": "", "\u20ac": "$", "\u00a3": "$", "~": " "}
)  # fmt: skip
_DROPPED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle(?![a-z])|\\[!,;: ]|\\q?quad(?![a-z])"
    r"|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![a-z])"
)
_FRAC = re.compile(r"\\[dtc]frac(?![a-z])")
_AROUND = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm)\s*\{([^{}]*)\}")
_SIMPLE = re.compile(r"-?\d{1,18}", re.ASCII)  # most answers: nothing to strip, nothing to read
_CHOICE = re.compile(r"\(?([A-Za-z])[).]?")

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_LATEX_FRACTION = re.compile(
    rf"([-+]?)\s*(?:({_INTEGER})\s*)?\\frac\s*(?:\{{\s*([-+]?\d+)\s*\}}|(\d))\s*(?:\{{\s*(\d+)\s*\}}|(\d))", re.ASCII
)
_FRACTION = re.compile(rf"([-+]?)\s*(?:({_INTEGER})\s+)?({_INTEGER})\s*/\s*(\d+)", re.ASCII)
_DECIMAL = re.compile(rf"([-+]?)\s*((?:{_INTEGER})?(?:\.\d+)?)", re.ASCII)
_WHOLE = re.compile(rf"[-+]?{_INTEGER}", re.ASCII)
_EITHER = re.compile(r"\\(?:lor|land|vee|wedge)(?![a-z])")
_UNIT = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+){0,3}|[a-zA-Z]{1,3}\s*(?:\^\s*\{?[23]\}?|/\s*[a-zA-Z]{1,4})")
_SHORT_UNITS = {"m", "g", "s", "h", "L"}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNITS = {
    "half", "halves", "third", "thirds", "quarter", "quarters", "pi", "sqrt", "root", "times", "plus", "minus", "or",
    "and", "to", "over", "mod", "base", "choose", "squared", "cubed", "factorial", "log", "ln", "sin", "cos", "tan",
    "exp", "if", "not", "than", "per", "by", "of", *_SCALES,
}  # fmt: skip


class Number(NamedTuple):
    """A number as it is written."""

    value: Fraction
    decimal: bool = False  # written with a decimal point: it may be rounded
    percent: bool = False


def plain(text: str) -> str:
    """The answer without what says nothing: dollar signs and braces around it, spacing, units of angle, a final dot."""
    text = _FRAC.sub(r"\\frac", _DROPPED.sub("", text.translate(_CHARACTERS)))
    text = text.replace("\\%", "%").replace("{,}", ",").strip().rstrip(".,;").strip()
    for left, right in _AROUND:
        if text.startswith(left) and text.endswith(right) and len(text) >= len(left + right):
            text = text[len(left) : len(text) - len(right)].strip()
    text = text.replace("\\$", "$")
    if (words := _WORDS.fullmatch(text)) is not None:
        text = words.group(1).strip()
    return " ".join(text.split())


def number(text: str) -> Number | None:
    """The number that a `plain` text is, whatever its unit; None: it is something else, or very long."""
    text = text.removeprefix("$").strip()
    for pattern in (_LATEX_FRACTION, _FRACTION, _DECIMAL):
        match = pattern.match(text)
        if match is None or not match.group().strip("-+ ") or sum(map(str.isdigit, match.group())) > MAX_DIGITS:
            continue
        rest = _WORDS.sub(lambda words: f" {words.group(1)}", text[match.end() :]).strip()
        word, _, unit = rest.partition(" ")
        scale = _SCALES.get(word.lower().removesuffix("s"), 1)
        percent = rest in ("%", "percent")
        if not percent and not _is_unit(unit.strip() if scale > 1 else rest):
            continue
        if (value := _read(pattern, match)) is not None:
            return Number(value * scale, pattern is _DECIMAL and "." in match.group(), percent)
    return None


def _is_unit(text: str) -> bool:
    """It does not count; False: it is part of the answer."""
    if not text or text == "$":
        return True
    names = re.findall(r"[A-Za-z]+", text)
    if not _UNIT.fullmatch(text) or any(name.lower() in _NO_UNITS for name in names):
        return False
    return len(names[0]) > 1 or names[0] in _SHORT_UNITS


def _read(pattern: re.Pattern[str], match: re.Match[str]) -> Fraction | None:
    if pattern is _DECIMAL:
        value = Fraction(match.group(2).replace(",", ""))
    else:
        whole, top, bottom = _parts(pattern, match)
        if not bottom or (whole and top < 0):
            return None
        value = whole + Fraction(top, bottom)
    return -value if match.group(1) == "-" else value


def _parts(pattern: re.Pattern[str], match: re.Match[str]) -> tuple[int, int, int]:
    groups = [(group or "").replace(",", "") for group in match.groups()]
    if pattern is _FRACTION:
        return int(groups[1] or 0), int(groups[2]), int(groups[3])
    return int(groups[1] or 0), int(groups[2] or groups[3]), int(groups[4] or groups[5])


def same(gold: str, answer: str) -> bool | None:
    """Of the texts as written: right, wrong, or None where only algebra can tell.

    A percentage is its number and its hundredth. Of two numbers of which one has a decimal point, algebra tells whether
    they are the same after rounding when they nearly are.
    """
    if _SIMPLE.fullmatch(gold) and _SIMPLE.fullmatch(answer):
        return int(gold) == int(answer)
    gold, answer = plain(gold), plain(answer)
    if not answer:
        return False
    if gold == answer:
        return True
    wanted, got = number(gold), number(answer)
    if wanted is not None and got is not None:
        return _same_number(wanted, got)
    letters = _CHOICE.fullmatch(gold), _CHOICE.fullmatch(answer)
    if letters[0] is not None and letters[1] is not None:
        return letters[0].group(1) == letters[1].group(1)
    if _is_several(answer) and not _is_several(gold):
        return False
    if gold.replace(" ", "").isalpha() and gold.casefold() == answer.casefold():
        return True
    return None


def _is_several(text: str) -> bool:
    """It says one thing or another, or that two numbers are one: of these, algebra takes the last."""
    whole = {part.replace(",", "").lstrip("+0") for part in map(str.strip, text.split("=")) if _WHOLE.fullmatch(part)}
    return len(whole) > 1 or _EITHER.search(text) is not None


def _same_number(wanted: Number, got: Number) -> bool | None:
    for mine in (wanted.value, wanted.value / 100) if wanted.percent else (wanted.value,):
        for theirs in (got.value, got.value / 100) if got.percent else (got.value,):
            if mine == theirs:
                return True
            if (wanted.decimal or got.decimal) and abs(mine - theirs) < Fraction(1, 10**5):
                return None
    return False
