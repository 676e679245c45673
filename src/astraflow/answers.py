"""Where a solution says its answer: a reply of a policy, or one of a data set."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\[\s\S]|([{}])")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` that is closed, the innermost of nested ones; None: there is none. Linear
    in the length of the text."""
    found: tuple[int, int] | None = None
    opened: list[int] = []  # where the contents of open braces begin; -1: no box
    for match in _TOKEN.finditer(text):
        if match.group(1):
            opened.append(match.end())
        elif match.group(2) == "{":
            opened.append(-1)
        elif match.group(2) == "}" and opened:
            start = opened.pop()
            if start >= 0 and (found is None or start > found[0]):
                found = start, match.start()
    return None if found is None else text[found[0] : found[1]].strip()
