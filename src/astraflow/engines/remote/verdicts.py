"""Verdicts that were given before: of equal requests the service is asked once. In memory, or in a file that several
nodes of a host share."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from astraflow.config.env import user_path
from astraflow.errors import EngineError

log = logging.getLogger(__name__)
_FILE = "verdicts.sqlite"
_BUSY_S = 5.0
_SPARE = 16  # one in so many makes room at once


class Verdict(msgspec.Struct, frozen=True):
    """What a service said."""

    content: str
    calls: list[tuple[str, str]] = []  # name, arguments as JSON text
    finish: str = "stop"  # stop, length
    tokens: int = 0  # prompt and reply, as the service counted


def key_of(url: str, body: Mapping[str, Any]) -> str:
    """Equal for requests that ask the same."""
    return hashlib.sha256(url.encode() + b"\n" + msgspec.json.encode(body, order="sorted")).hexdigest()


class Verdicts:
    """At most `entries`; those that were not used for longest go first. Lives on one thread at a time.

    A file that fails later than at its start costs money, not episodes: it is said once and asked no more.
    """

    def __init__(self, directory: str, entries: int) -> None:
        """`directory`: "" keeps them in memory. Raises: EngineError: there is no such place."""
        self._entries = entries
        try:
            if directory:
                user_path(directory).mkdir(parents=True, exist_ok=True)
            place = str(user_path(directory) / _FILE) if directory else ":memory:"
            self._db: sqlite3.Connection | None = sqlite3.connect(
                place, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=OFF")  # a lost verdict is asked for again
            self._db.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, said BLOB, used REAL)")
            self._db.execute("CREATE INDEX IF NOT EXISTS by_use ON verdicts (used)")
        except (OSError, sqlite3.Error) as error:
            raise EngineError(
                "engine.cache_dir", directory, f"cannot keep verdicts ({error})", "name a directory that can be written"
            ) from error

    def find(self, key: str) -> Verdict | None:
        """The verdict of an equal request."""
        if self._db is None:
            return None
        try:
            row = self._db.execute("SELECT said FROM verdicts WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            self._db.execute("UPDATE verdicts SET used = ? WHERE key = ?", (time.time(), key))
            return msgspec.json.decode(row[0], type=Verdict)
        except (sqlite3.Error, msgspec.DecodeError) as error:
            self._give_up(error)
            return None

    def keep(self, key: str, verdict: Verdict) -> None:
        """For the next equal request."""
        if self._db is None:
            return
        try:
            said = msgspec.json.encode(verdict)
            self._db.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?)", (key, said, time.time()))
            (count,) = self._db.execute("SELECT COUNT(*) FROM verdicts").fetchone()
            if count > self._entries:
                gone = count - self._entries + self._entries // _SPARE
                self._db.execute(
                    "DELETE FROM verdicts WHERE key IN (SELECT key FROM verdicts ORDER BY used LIMIT ?)", (gone,)
                )
        except sqlite3.Error as error:
            self._give_up(error)

    def close(self) -> None:
        """Twice is once."""
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _give_up(self, error: Exception) -> None:
        log.warning("verdicts are kept no more (%s)", error)
        self.close()
