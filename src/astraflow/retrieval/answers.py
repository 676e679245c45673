"""Short answers compared with what is accepted, by exact match and F1 of SQuAD's kind (arXiv:1606.05250)."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
MAX_CHARS = 2000  # of an answer; what is beyond is not read


def final_answer(text: str) -> str:
    """What stands in the last `<answer>`, else the whole text."""
    found = _TAGGED.findall(text)
    return str(found[-1] if found else text).strip()


@lru_cache(maxsize=10_000)
def normalised(text: str) -> str:
    """Lower case, without accents, articles and punctuation, one space between words; never nothing for something."""
    folded = unicodedata.normalize("NFKD", text[:MAX_CHARS].casefold())
    plain = "".join(c for c in folded if (kind := unicodedata.category(c)) != "Mn" and kind[0] not in "PS")
    words = " ".join(_ARTICLES.sub(" ", plain).split())
    return words or " ".join(folded.split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1.0 when it is one of them."""
    said = normalised(answer)
    return float(any(said == normalised(gold) for gold in accepted))


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, with the one of them that it is most like."""
    return max((_f1(normalised(answer).split(), normalised(gold).split()) for gold in accepted), default=0.0)


def _f1(said: list[str], wanted: list[str]) -> float:
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def accepted_of(task: Mapping[str, Any], field: str) -> list[str]:
    """The answers that a task accepts: its list `field`, or what is in `answer`. Empty: it has none.

    Raises: ValueError: they are no texts.
    """
    given = task.get(field)
    if given is None:
        given = task.get("answer")
    if given is None:
        return []
    every = given if isinstance(given, list) else [given]
    if not all(isinstance(gold, str | int | float) for gold in every):
        raise ValueError(f"the task's {field}={given!r} must be a text or a list of texts")
    return [str(gold) for gold in every]
