"""What the small participants share: none minds a service that is away or has no room, unless its fault says so."""

from __future__ import annotations

import os
import time
from typing import Any

from astraflow.errors import Unreachable, WireError
from astraflow.wire.client import HttpClient


class Participant:
    def __init__(self, url: str, fault: str) -> None:
        self.token = "wrong" if fault == "no_token" else os.environ["ASTRAFLOW_TOKEN"]
        self.fault, self.http = fault, HttpClient(url, self.token, give_up_s=0.0)

    def patiently(self, call: Any, repeat: bool = True) -> Any:
        """Until there is an answer; None: it was lost, and `repeat` is False."""
        while True:
            try:
                return call()
            except WireError as error:
                away = isinstance(error, Unreachable)
                if (away and self.fault == "dies_when_away") or (error.status == 507 and self.fault == "dies_on_507"):
                    raise
                if not (away or error.status == 507):
                    raise
                if away and not repeat:
                    return None
                time.sleep(0.1)
