"""Several servers that run already and serve one policy as one: replicas of one model.

Each generation goes to the replica where the fewest are running. A change of weights reaches all of them before one of
them goes on, so a load balancer in front of them cannot stand in for their URLs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from astraflow.engines.served.process import Host
from astraflow.engines.served.server import Ask, Comparison, Piece, Server

R = TypeVar("R")


class Fleet:
    """See `served.server.Server`."""

    def __init__(self, servers: Sequence[Server]) -> None:
        """At least one."""
        self._servers = list(servers)
        self._running = [0] * len(servers)
        self.counts = all(server.counts for server in servers)

    async def look(self) -> int:
        """The shortest of their limits."""
        return min(await _all(server.look() for server in self._servers))

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """By one replica from its first token to its last."""
        place = min(range(len(self._servers)), key=self._running.__getitem__)
        self._running[place] += 1
        try:
            async with aclosing(self._servers[place].generate(ask)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._running[place] -= 1

    async def pause(self) -> Mapping[str, int]:
        """All of them stand still."""
        counted = await _all(server.pause() for server in self._servers)
        return {name: count for counts in counted for name, count in counts.items()}

    async def load(self, path: Path, version: int) -> None:
        """Each reads the file."""
        await _all(server.load(path, version) for server in self._servers)

    async def resume(self) -> None:
        """All go on."""
        await _all(server.resume() for server in self._servers)

    async def label(self, version: int) -> None:
        """All of them."""
        await _all(server.label(version) for server in self._servers)

    async def compare(self, path: Path) -> Comparison:
        """What differs, or is unknown, in any of them."""
        found = await _all(server.compare(path) for server in self._servers)
        return Comparison(
            min(one.compared for one in found),
            [name for one in found for name in one.differing],
            [name for one in found for name in one.unknown],
        )

    async def gauges(self) -> dict[str, float]:
        """Sums; kv_usage: of the fullest."""
        total: dict[str, float] = {}
        for gauges in await _all(server.gauges() for server in self._servers):
            for name, value in gauges.items():
                known = total.get(name, 0.0)
                total[name] = max(known, value) if name == "kv_usage" else known + value
        return total


class FleetHost:
    """Waits for all of them. See `served.process.Host`."""

    starts_with_ours = False

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts

    async def start(self) -> Server:
        """Raises: EngineError, LaunchError: one of them does not answer."""
        return Fleet(await _all(host.start() for host in self._hosts))

    def ended(self) -> str | None:
        """Of the first that ended."""
        return next((how for host in self._hosts if (how := host.ended()) is not None), None)

    def tail(self) -> str:
        """Of all."""
        return "\n".join(filter(None, (host.tail() for host in self._hosts)))

    def fix(self, how: str) -> str:
        """As the first says."""
        return self._hosts[0].fix(how)

    async def stop(self) -> None:
        """Those that are ours."""
        await _all(host.stop() for host in self._hosts)

    async def close(self) -> None:
        """Those that are ours."""
        await _all(host.close() for host in self._hosts)


def one_of(hosts: Sequence[Host]) -> Host:
    """At least one, as one."""
    return hosts[0] if len(hosts) == 1 else FleetHost(hosts)


async def _all(calls: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Results in order; the first error once all have ended, so that nothing goes on behind a caller that was told."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return [result for result in done if not isinstance(result, BaseException)]
