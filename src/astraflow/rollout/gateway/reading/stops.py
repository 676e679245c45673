"""Text that ends at a stop string, piece by piece: what may be the start of one is held back."""

from __future__ import annotations

from collections.abc import Sequence


def begun(text: str, words: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the start of one of `words` (less than a whole one)."""
    longest = 0
    for word in words:
        for size in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:size]):
                longest = size
                break
    return longest


class StopScanner:
    """Finds the first stop string. Of several that one token completes, the one that starts first counts."""

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What may be given on. After the piece in which one is `found`, feed no more."""
        if not self._stops:
            return text
        held = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return held[:at]
        keep = len(held) - begun(held, self._stops)
        self._held = held[keep:]
        return held[:keep]

    def end(self) -> str:
        """What was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held
