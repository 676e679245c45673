"""Episodes of a run for a script: lease, play, hand in. Blocking; several threads may share one `Swarm`."""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from astraflow import __version__
from astraflow.config.env import token_from_env
from astraflow.errors import WireError
from astraflow.swarm.door import DoorClient
from astraflow.swarm.play import Play, RunOver
from astraflow.wire.patience import GONE_S
from astraflow.wire.swarm.messages import PlaysReply, PlaysRequest

log = logging.getLogger(__name__)
_POLL_S = 20.0
_GOODBYE_S = 1.0


class Swarm:
    """A client of the door of a node. Open as many as you like, anywhere.

    Args: url: what the node printed. token: of the run; None: the variable ASTRAFLOW_TOKEN, if it is set. name: for
    people. code: version of the code that plays, shown in metrics. sources: that it can play; empty: all. give_up_s:
    how long the door may be away (its node restarts) before `Unreachable` is raised.
    """

    def __init__(
        self, url: str, token: str | None = None, *, name: str = "", code: str = "", sources: Iterable[str] = (),
        give_up_s: float = GONE_S,
    ) -> None:  # fmt: skip
        name = name or socket.gethostname()
        self.client = f"{name}-{uuid.uuid4().hex[:12]}"
        self._sources = list(sources)
        token = token if token is not None else token_from_env()
        self._door = DoorClient(url, token, client=self.client, name=name, give_up_s=give_up_s)
        self._door.code = code

    @property
    def code(self) -> str:
        """Version of the code that plays; may be set anew at any time."""
        return self._door.code

    @code.setter
    def code(self, code: str) -> None:
        self._door.code = code

    def plays(self) -> Iterator[Play]:
        """Episodes one after the other, until the run is over. Raises: as `leases`, but for RunOver."""
        while True:
            try:
                play = self.lease()
            except RunOver:
                return
            if play is not None:
                yield play

    def lease(self, wait_s: float = _POLL_S) -> Play | None:
        """An episode; None: there was none for `wait_s`. Raises: as `leases`."""
        return next(iter(self.leases(1, wait_s)), None)

    def leases(self, count: int, wait_s: float = _POLL_S) -> list[Play]:
        """Up to `count` episodes, waiting for the first.

        Raises: RunOver; Unreachable: the door was away for too long; Unauthorized, WireError: it refused.
        """
        door = self._door
        if door.over is not None:
            raise door.over
        body = PlaysRequest(
            client=self.client, count=count, wait_s=wait_s, request_id=uuid.uuid4().hex, sources=self._sources,
            name=door.name, version=__version__, code=door.code,
        )  # fmt: skip
        reply = door.ask("/swarm/leases", body, PlaysReply, wait_s=wait_s)
        door.heartbeat_s = reply.heartbeat_s
        plays = [Play(door, lease, door.base_url) for lease in reply.leases]
        door.add(plays)
        return plays

    def close(self) -> None:
        """Give back what is open, and end."""
        door = self._door
        door.give_up_s = 0.0
        door.stop()
        end = time.monotonic() + _GOODBYE_S
        for play in door.plays:
            if time.monotonic() > end:
                break
            try:
                play.abort()
            except WireError as error:  # the door will give it back by itself
                log.info("%s: %s", play.episode_id, error)
        door.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
