"""Which of several stores to ask first: the one that was fastest, as far as that is known."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from astraflow.weights.objects.layout import is_object_store

FORGET_S = 600.0
"""A store is measured afresh after so long, so a link that got better is found."""

FAILED_S = 60.0
"""One that failed is asked again after so long: a relay starts again, a link comes back."""

PROBE_S = 3.0
"""A store that does not answer within this is asked last."""

_UNREACHABLE_S = 3600.0  # what one that does not answer is said to need
_HOPED_BYTES_PER_S = 125e6  # of one that answers and from which nothing came yet: a good network
_SHARE = 0.5  # of the newest measurement in the rate


@dataclass
class _Seen:
    answer_s: float  # time to a first answer
    bytes_per_s: float | None  # None: nothing was fetched yet
    until: float  # then it is measured afresh


class Chooser:
    """Thread-safe. `probe`: seconds until the store at a base URL answers; raises OSError when it does not."""

    def __init__(self, probe: Callable[[str], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._probe, self._clock = probe, clock
        self._lock, self._probing = threading.Lock(), threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._nbytes = 1 << 20  # of the fetch before: what the next one is expected to be

    def order(self, urls: Iterable[str]) -> list[str]:
        """This host's directories as they are given, then the other stores, fastest first.

        One from which nothing came yet is taken for a good network: tried before one that is known to be slower.
        """
        given = list(urls)
        near = [url for url in given if urlsplit(url).scheme == "file" and not is_object_store(url)]
        far = [url for url in given if url not in near]
        if len(far) < 2:
            return near + far
        with self._probing:  # who comes meanwhile uses what is found
            self._measure({_base(url) for url in far})
        return near + sorted(far, key=self._expected_s)

    def fetched(self, url: str, nbytes: int, seconds: float) -> None:
        """So much came from there in that time."""
        if not nbytes:
            return
        rate = nbytes / max(seconds, 1e-6)
        with self._lock:
            self._nbytes = nbytes
            seen = self._seen.setdefault(_base(url), _Seen(0.0, None, self._clock() + FORGET_S))
            seen.bytes_per_s = rate if seen.bytes_per_s is None else _SHARE * rate + (1 - _SHARE) * seen.bytes_per_s

    def failed(self, url: str) -> None:
        """It did not give what it was asked for: last, until it is measured afresh."""
        with self._lock:
            self._seen[_base(url)] = _Seen(_UNREACHABLE_S, None, self._clock() + FAILED_S)

    def is_broken(self, url: str) -> bool:
        """It failed, or did not answer, and it is not yet time to ask it again."""
        with self._lock:
            seen = self._seen.get(_base(url))
        return seen is not None and seen.answer_s >= _UNREACHABLE_S and self._clock() <= seen.until

    def _measure(self, bases: Iterable[str]) -> None:
        """Probe those that are due, all at once; who does not answer in PROBE_S counts as away."""
        now, answers = self._clock(), dict[str, float]()
        with self._lock:
            due = [base for base in bases if base not in self._seen or now > self._seen[base].until]

        def ask(base: str) -> None:
            with contextlib.suppress(OSError):
                answers[base] = self._probe(base)

        threads = [threading.Thread(target=ask, args=(base,), name="probe", daemon=True) for base in due]
        deadline = time.monotonic() + PROBE_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            for base in due:
                answer_s = answers.get(base, _UNREACHABLE_S)
                self._seen[base] = _Seen(answer_s, None, now + (FORGET_S if answer_s < _UNREACHABLE_S else FAILED_S))

    def _expected_s(self, url: str) -> float:
        with self._lock:
            seen = self._seen[_base(url)]
        return seen.answer_s + self._nbytes / (seen.bytes_per_s or _HOPED_BYTES_PER_S)


def _base(url: str) -> str:
    if is_object_store(url):
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
