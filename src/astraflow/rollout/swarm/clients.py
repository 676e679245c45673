"""Who plays at a door, and how their episodes ended. For people and for refusals that say what happened."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from astraflow.wire.swarm.messages import ClientStatus, Ending, FinishReply

_MAX_CLIENTS, _MAX_OVER, _MAX_CODES = 1024, 8192, 64  # remembered


@dataclass
class Client:
    """One process that plays. `seen`: monotonic time of its last request."""

    name: str = ""
    version: str = ""
    code: str = ""
    seen: float = 0.0
    told: bool = False  # that the run is over
    endings: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Over:
    """How an attempt ended. `said`, `reply`: the finish or fail that ended it, to know it again."""

    client: str
    ending: Ending
    why: str
    said: object = None
    reply: FinishReply | None = None


class Records:
    """Clients by id, and the newest attempts that are over."""

    def __init__(self) -> None:
        self.clients: OrderedDict[str, Client] = OrderedDict()
        self.endings: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self._over: OrderedDict[tuple[str, int], Over] = OrderedDict()

    def heard(self, client_id: str, now: float) -> Client:
        """A request of this client arrived."""
        client = self.clients.setdefault(client_id, Client())
        self.clients.move_to_end(client_id)
        client.seen = now
        while len(self.clients) > _MAX_CLIENTS:
            self.clients.popitem(last=False)
        return client

    def introduce(self, client: Client, name: str, version: str, code: str) -> None:
        """What a client says of itself; what it leaves out stays as it was."""
        client.name = name or client.name
        client.version = version or client.version
        client.code = code or client.code

    def over(self, episode_id: str, attempt: int) -> Over | None:
        """How the attempt ended; None: it did not end here, or long ago."""
        return self._over.get((episode_id, attempt))

    def end(self, episode_id: str, attempt: int, over: Over, code: str = "") -> None:
        """An attempt is over."""
        self._over[episode_id, attempt] = over
        while len(self._over) > _MAX_OVER:
            self._over.popitem(last=False)
        self.endings[over.ending] += 1
        if (client := self.clients.get(over.client)) is not None:
            client.endings[over.ending] += 1
        if code and (code in self.codes or len(self.codes) < _MAX_CODES):
            self.codes[code] += 1

    def alive(self, now: float, within_s: float) -> list[str]:
        """Ids of clients that were heard of."""
        return [client_id for client_id, client in self.clients.items() if now - client.seen <= within_s]

    def status(self, now: float, playing: Counter[str]) -> list[ClientStatus]:
        """Of every client that is remembered; `playing`: client -> episodes."""
        return [
            ClientStatus(
                client=client_id, name=c.name, version=c.version, code=c.code,
                silent_s=round(now - c.seen, 3), playing=playing[client_id], endings=dict(c.endings),
            )
            for client_id, c in self.clients.items()
        ]  # fmt: skip
