"""Bad input, counted by reason: what was refused at the door changed nothing, but somebody should hear of it."""

from __future__ import annotations

from collections import Counter

from astraflow.errors import JournalError, SchemaError
from astraflow.wire.app import HttpError
from astraflow.wire.codec import TRAJECTORY_SCHEMA

_BY_STATUS = {
    400: "cut",
    401: "token",
    413: "too_large",
    415: "content_type",
    422: "malformed",
    426: "protocol",
}
_BY_THING = {
    "column": "column_missing",
    "body": "not_arrow",
    "episode": "empty_episode",
    "episode.tokens": "overlong",
}
_COLUMNS = {f"column {name}" for name in TRAJECTORY_SCHEMA.names}


class Refused:
    """Requests refused since the start of the service, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def hear(self, error: Exception) -> None:
        """A request was answered with this error."""
        reason = reason_of(error)
        if reason is not None:
            self.counts[reason] += 1


def reason_of(error: Exception) -> str | None:
    """One of a few words; None: the request was well formed, and the state of the run refused it."""
    match error:
        case SchemaError() if error.thing in _COLUMNS:
            return error.thing.replace(" ", "_")
        case SchemaError():
            return _BY_THING.get(error.thing, "header" if "header" in error.thing else "malformed")
        case HttpError():
            return error.reason or _BY_STATUS.get(error.status)
        case JournalError():
            return "no_room"
    return None
