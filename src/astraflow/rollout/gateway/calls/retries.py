"""Which request is a retry of one before: decision 0010.

A retry gets the answer of the call that it repeats, finished or still running, so that the call is trained once.

| request says                  | it is a retry of                                                                |
|-------------------------------|---------------------------------------------------------------------------------|
| `Idempotency-Key`             | the request before with this key; another body under the same key is refused    |
| `x-stainless-retry-count` > 0 | the newest equal request that runs, or that was answered within a minute        |
| neither                       | none: two equal requests are two samples                                        |

What was answered by an error is tried anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import msgspec

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.calls.run import Run
from astraflow.rollout.gateway.dialect import ChatRequest

KEPT_S = 60.0  # an SDK that lost an answer asks again within seconds
_KEPT_RUNS = 256


class Retry(msgspec.Struct, frozen=True):
    """What the headers of a request say about it."""

    idempotency_key: str = ""  # empty: none
    count: int = 0  # tries before this one, as the SDKs of OpenAI and Anthropic say


def retry_of(headers: Mapping[str, str]) -> Retry:
    """From HTTP headers; a count that is no number is none."""
    count = headers.get("x-stainless-retry-count", "")
    known = count.isascii() and count.isdigit() and len(count) < 10  # `int` refuses thousands of digits
    return Retry(headers.get("idempotency-key", ""), int(count) if known else 0)


class Retries:
    """The requests of one episode that may be repeated."""

    def __init__(self) -> None:
        self._by_key: dict[str, Run] = {}
        self._begun: deque[Run] = deque(maxlen=_KEPT_RUNS)

    def find(self, request: ChatRequest, retry: Retry, *, stream: bool) -> Run | None:
        """The run that answers `request` already.

        Raises: GatewayError: its key was used for another request.
        """
        if retry.idempotency_key:
            run = self._by_key.get(retry.idempotency_key)
            if run is None or run.failed:
                return None
            if not _repeats(run, request, stream):
                raise GatewayError(
                    "idempotency-key", retry.idempotency_key, "was used for another request of this episode",
                    "give every request its own key", code="idempotency_key_reused",
                )  # fmt: skip
            return run
        if retry.count:
            return self._newest(request, stream)
        return None

    def add(self, run: Run, retry: Retry) -> None:
        """A request that was begun."""
        self._begun.append(run)
        if retry.idempotency_key:
            self._by_key[retry.idempotency_key] = run

    def _newest(self, request: ChatRequest, stream: bool) -> Run | None:
        now = time.monotonic()
        for run in reversed(self._begun):
            if not _repeats(run, request, stream) or (run.outcome is not None and now - run.ended_s > KEPT_S):
                continue
            if not run.failed:
                return run
            if not run.forgiven:  # this try is the answer to that error
                run.forgiven = True
                return None
        return None


def _repeats(run: Run, request: ChatRequest, stream: bool) -> bool:
    return bool(run.events) == stream and run.request == request
