"""Which of several stores to ask first: the one that was fastest, as far as that is known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

FORGET_S = 600.0
"""A store is measured afresh after so long, so a link that got better is found."""

_UNREACHABLE_S = 3600.0  # what one that does not answer is said to need
_SHARE = 0.5  # of the newest measurement in the rate


@dataclass
class _Seen:
    answer_s: float  # time to a first answer
    bytes_per_s: float | None  # None: nothing was fetched yet
    at: float


class Chooser:
    """Thread-safe. `probe`: seconds until the store at a base URL answers; raises OSError when it does not."""

    def __init__(self, probe: Callable[[str], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._probe, self._clock = probe, clock
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._nbytes = 1 << 20  # of the fetch before: what the next one is expected to be

    def order(self, urls: Iterable[str]) -> list[str]:
        """This host's directories as they are given, then the other stores, fastest first.

        One of which only the time to answer is known is tried before one that is known to need longer than that.
        """
        given = list(urls)
        far = [url for url in given if urlsplit(url).scheme in ("http", "https")]
        near = [url for url in given if url not in far]
        return near + (sorted(far, key=self._expected_s) if len(far) > 1 else far)

    def fetched(self, url: str, nbytes: int, seconds: float) -> None:
        """So much came from there in that time."""
        if not nbytes:
            return
        rate = nbytes / max(seconds, 1e-6)
        with self._lock:
            self._nbytes = nbytes
            seen = self._seen.setdefault(_base(url), _Seen(0.0, None, self._clock()))
            seen.bytes_per_s = rate if seen.bytes_per_s is None else _SHARE * rate + (1 - _SHARE) * seen.bytes_per_s

    def failed(self, url: str) -> None:
        """It did not give what it was asked for: last, until it is measured afresh."""
        with self._lock:
            self._seen[_base(url)] = _Seen(_UNREACHABLE_S, None, self._clock())

    def _expected_s(self, url: str) -> float:
        base, now = _base(url), self._clock()
        with self._lock:
            seen = self._seen.get(base)
        if seen is None or now - seen.at > FORGET_S:
            try:
                answer_s = self._probe(base)
            except OSError:
                answer_s = _UNREACHABLE_S
            seen = _Seen(answer_s, None, now)
            with self._lock:
                self._seen[base] = seen
        return seen.answer_s + (self._nbytes / seen.bytes_per_s if seen.bytes_per_s else 0.0)


def _base(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
