"""The door of a node, asked from elsewhere: requests that are repeated while it is away, and heartbeats."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from astraflow import __version__
from astraflow.errors import Unreachable, WireError
from astraflow.swarm.play import Lost, Play, RunOver
from astraflow.wire.client import HttpClient
from astraflow.wire.patience import RETRY_S, Stopped, ask_patiently
from astraflow.wire.swarm.messages import Playing, PlayingReply

R = TypeVar("R")
log = logging.getLogger(__name__)
_FIRST_HEARTBEAT_S, _HEARTBEAT_TIMEOUT_S = 1.0, 10.0
_MAX_CONNECTIONS = 64  # that are kept open between requests
_END_S = 1.0


class DoorClient:
    """One client of one door. Thread-safe; a thread of its own keeps `plays` alive."""

    def __init__(self, url: str, token: str | None, *, client: str, name: str, give_up_s: float) -> None:
        self.client, self.name, self.code = client, name, ""
        self.give_up_s, self.heartbeat_s = give_up_s, _FIRST_HEARTBEAT_S
        self.over: RunOver | None = None
        self._http = HttpClient(url, token, give_up_s=min(RETRY_S, give_up_s), max_connections=_MAX_CONNECTIONS)
        self._beats = HttpClient(url, token, give_up_s=0.0, timeout_s=_HEARTBEAT_TIMEOUT_S)
        self._plays: set[Play] = set()
        self._lock = threading.Lock()
        self._stop, self._beat = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._heartbeats, name="swarm heartbeats", daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        """For calls. It holds behind a forwarded port, a prefix and TLS."""
        return f"{self._http.base_url}/v1"

    @property
    def plays(self) -> list[Play]:
        """Those that are open."""
        with self._lock:
            return list(self._plays)

    def ask(self, path: str, body: msgspec.Struct, reply: type[R], *, wait_s: float = 0.0) -> R:
        """A request that is repeated while the door is away, which the log says.

        Raises: Lost, RunOver; WireError: another refusal; Unreachable: it was away for `give_up_s`.
        """

        def call() -> R:
            return self._http.json("POST", path, body, reply, wait_s=wait_s)

        try:
            return ask_patiently(call, self._stop, self.give_up_s, "the swarm door")
        except Stopped as error:
            raise Unreachable("swarm=closed asks nothing any more; open another Swarm") from error
        except WireError as error:
            raise self._named(error) from error

    def add(self, plays: Iterable[Play]) -> None:
        """Keep these alive, from now on."""
        with self._lock:
            self._plays.update(plays)
        self._beat.set()

    def forget(self, play: Play) -> None:
        """It is over."""
        with self._lock:
            self._plays.discard(play)

    def stop(self) -> None:
        """No more heartbeats; a request that is not answered is not sent again."""
        self._stop.set()
        self._beat.set()

    def close(self) -> None:
        """End everything."""
        self.stop()
        self._http.close()
        self._beats.close()
        self._thread.join(_END_S)

    def _named(self, error: WireError) -> WireError:
        if error.status == 410:
            self.over = RunOver(str(error), 410)
            return self.over
        return Lost(str(error), error.status) if error.status in (404, 409) else error

    def _heartbeats(self) -> None:
        while not self._stop.is_set():
            self._beat.wait(self.heartbeat_s)
            self._beat.clear()
            plays = {(play.episode_id, play.attempt): play for play in self.plays}
            if self._stop.is_set() or self.over is not None or not plays:
                continue
            body = Playing(client=self.client, playing=list(plays), name=self.name, version=__version__, code=self.code)
            try:
                reply = self._beats.json("POST", "/swarm/heartbeat", body, PlayingReply)
            except WireError as error:  # whoever plays asks the door too, and is told
                log.debug("heartbeat: %s", self._named(error))
                continue
            for key in reply.cancelled:
                if (play := plays.get(key)) is not None and not play.over:
                    log.info("%s is not wanted any more", play.episode_id)
                    play.cancelled = True
                    self.forget(play)
