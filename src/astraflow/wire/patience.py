"""Waiting for a service that is away for a while: it restarts, or its disk is full. All stations wait alike.

Requests of the protocol are idempotent, so what was not answered is asked again. Who waits says so in the log.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from astraflow.errors import Unreachable, WireError
from astraflow.wire.client import DISK_FULL

GONE_S = 120.0  # a service that was away for so long does not come back
FIRST_ANSWER_S = 30.0  # one that has never answered is given up earlier
RETRY_S = 2.0  # `give_up_s` of a client whose calls are repeated: then the wait is logged, and a stop is seen
_TELL_EVERY_S = 10.0
_PAUSE_S = 0.1

R = TypeVar("R")
log = logging.getLogger(__name__)


class Stopped(Exception):
    """A stop was asked for while the service did not answer."""


class Patience:
    """Of one process for `service`. `meanwhile`: what the log says of the time until it is back."""

    def __init__(self, limit_s: float = GONE_S, meanwhile: str = "", service: str = "the dataflow service") -> None:
        self.limit_s, self._meanwhile, self._service = limit_s, meanwhile, service
        self.num_failures = 0
        self._told = -math.inf

    def failed(self, error: WireError, since: float) -> None:
        """One more request was not answered; the service has been away since `since` (`time.monotonic`).

        Raises: `error`, saying how long, when the limit is over.
        """
        self.num_failures += 1
        now = time.monotonic()
        lasted_s = now - since
        if lasted_s >= self.limit_s:
            raise type(error)(f"{error}; given up after {lasted_s:.0f} s", error.status) from error
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            left_s = self.limit_s - lasted_s
            log.warning("waits for %s, up to %.0f s more%s: %s", self._service, left_s, self._meanwhile, error)


def is_away(error: WireError) -> bool:
    """The service may answer later; any other error is an answer."""
    return isinstance(error, Unreachable) or error.status == DISK_FULL


def ask_patiently(
    call: Callable[[], R], stop: threading.Event, limit_s: float = GONE_S, service: str = "the dataflow service"
) -> R:
    """What `call` returns, which asks `service`; again while that is away.

    Raises: Stopped: `stop` was set meanwhile. WireError: it refused, or was away for `limit_s`.
    """
    patience, since = Patience(limit_s, service=service), time.monotonic()
    while True:
        try:
            return call()
        except WireError as error:
            if not is_away(error):
                raise
            if stop.is_set():
                raise Stopped from error
            patience.failed(error, since)
        stop.wait(_PAUSE_S)
