"""Tool servers that stay warm: started once, leased by episodes, replaced when they hang, end, or are worn."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
import weakref
from collections import deque
from typing import Any

import msgspec

from astraflow.config.rooms import required
from astraflow.errors import EpisodeError
from astraflow.processes.tied import tied

mcp = required("mcp", "mcp")
_transport = required("mcp.client.stdio", "mcp")
log = logging.getLogger("astraflow.environment")
_PERIOD_S = 30.0
_END_S = 15.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where servers come from, and how many there are in each worker process."""

    command: tuple[str, ...] = ()  # of a server on its standard input and output
    env: tuple[tuple[str, str], ...] = ()
    url: str = ""  # of one over streamable HTTP
    servers: int = 1
    share: bool = True  # False: an episode has a server of its own while it lasts
    recycle_after: int = 0  # episodes; 0: never
    start_s: float = 60.0
    call_s: float = 10.0


class Server:
    """One connection. The task that opened it closes it, as its library demands."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self.ready: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self.episodes = self.used = 0
        self._client: Any = None
        self.task = asyncio.create_task(self._live(), name="mcp server")

    @property
    def ended(self) -> bool:
        """It serves no more."""
        return self._stop.is_set() or self.task.done()

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of a tool."""
        return await self._client.call_tool(name, arguments)

    def stop(self) -> None:
        """Its process ends in the background: asked at first, then killed."""
        self._stop.set()

    async def _live(self) -> None:
        try:
            with open(os.devnull, "w") as nowhere:
                async with mcp.Client(self._where(nowhere)) as client:
                    self._client = client
                    tools = await _listed(client)
                    if not self.ready.done():
                        self.ready.set_result(tools)
                    await self._stop.wait()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if self.ready.done():
                log.warning("an mcp server ended: %s", text)
            else:
                self.ready.set_exception(EpisodeError(f"env_error: the mcp server does not start: {text}"))
        finally:
            self.ready.cancel()

    def _where(self, errors: Any) -> Any:
        if self._settings.url:
            return self._settings.url
        env = dict(self._settings.env)
        if shutil.which(self._settings.command[0], path=env.get("PATH")) is None:
            raise FileNotFoundError(f"there is no program {self._settings.command[0]}")
        program, *words = tied(self._settings.command)  # one that hangs does not read that its input is closed
        server = _transport.StdioServerParameters(command=program, args=words, env=env or None)
        return _transport.stdio_client(server, errlog=errors)


class Servers:
    """The servers of one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._servers: list[Server] = []
        self._tasks = set[asyncio.Task[None]]()  # of these, and of those that are ending
        self._free = asyncio.Condition()
        self.starts = self.kills = self.calls = 0
        self._seconds: deque[float] = deque(maxlen=1000)
        self._said = time.monotonic()

    async def lease(self) -> Server:
        """A server that is ready. Raises: EpisodeError: it does not start."""
        async with self._free:
            while (server := self._choose()) is None:
                await self._free.wait()
            server.episodes += 1
            server.used += 1
        try:
            async with asyncio.timeout(self._settings.start_s):
                await asyncio.shield(server.ready)
        except TimeoutError:
            await self.retire(server)
            await self.release(server)
            raise EpisodeError(f"env_timeout: the mcp server was not ready in {self._settings.start_s:g} s") from None
        except BaseException:
            await self.release(server)
            raise
        return server

    async def release(self, server: Server) -> None:
        """An episode leaves it."""
        server.episodes -= 1
        worn = 0 < self._settings.recycle_after <= server.used
        if worn and not server.episodes:
            server.stop()
        async with self._free:
            self._free.notify_all()

    async def call(self, server: Server, name: str, arguments: dict[str, Any]) -> Any:
        """Raises: EpisodeError: past its deadline (the server is stopped), or the connection is lost."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.call_s) as limit:
                result = await server.call(name, arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            await self.retire(server)
            limit_s = self._settings.call_s
            raise EpisodeError(f"env_timeout: tool {name} gave nothing in {limit_s:g} s; its server ends") from error
        except mcp.MCPError as error:
            await asyncio.sleep(0)
            if not server.ended and "closed" not in str(error).lower():
                raise
            await self.retire(server)
            raise EpisodeError(f"env_error: the mcp server is lost: {error}") from error
        self._count(time.monotonic() - began)
        return result

    async def retire(self, server: Server) -> None:
        """Nobody gets it any more."""
        self.kills += not server.ended
        server.stop()

    async def end(self) -> None:
        """Stop all, and wait until they are gone."""
        for server in self._servers:
            server.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)

    def _choose(self) -> Server | None:
        """The one with the fewest episodes; None: wait."""
        self._servers = [server for server in self._servers if not server.ended]
        worn = self._settings.recycle_after
        usable = [s for s in self._servers if not (worn and s.used >= worn)]
        best = min(usable, key=lambda s: s.episodes, default=None)
        if best is not None and (not best.episodes or (self._settings.share and not self._may_start)):
            return best
        if self._may_start:
            self.starts += 1
            server = Server(self._settings)
            self._servers.append(server)
            self._tasks.add(server.task)
            server.task.add_done_callback(self._tasks.discard)
            return server
        return None

    @property
    def _may_start(self) -> bool:
        return len(self._servers) < self._settings.servers

    def _count(self, seconds: float) -> None:
        self.calls += 1
        self._seconds.append(seconds)
        if time.monotonic() - self._said > _PERIOD_S:
            self._said = time.monotonic()
            log.info("mcp servers: %s", self.line())

    def line(self) -> str:
        """Counts, and milliseconds of the newest calls."""
        spent = sorted(self._seconds)
        p50, p99 = (1e3 * spent[int(q * (len(spent) - 1))] if spent else 0.0 for q in (0.5, 0.99))
        live = sum(not server.ended for server in self._servers)
        counts = f"starts {self.starts}, live {live}, kills {self.kills}, calls {self.calls}"
        return f"{counts}, p50_ms {p50:.3g}, p99_ms {p99:.3g}"


_OF_LOOPS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Settings, Servers]] = weakref.WeakKeyDictionary()


def servers_of(settings: Settings) -> Servers:
    """Those of the running loop."""
    of_loop = _OF_LOOPS.setdefault(asyncio.get_running_loop(), {})
    if settings not in of_loop:
        of_loop[settings] = Servers(settings)
    return of_loop[settings]


async def end_servers() -> None:
    """Stop all servers of the running loop."""
    for servers in _OF_LOOPS.pop(asyncio.get_running_loop(), {}).values():
        await servers.end()


async def _listed(client: Any) -> list[dict[str, Any]]:
    """Tools as OpenAI function schemas: name, description and schema are taken over as they are."""
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description or "", "parameters": t.input_schema},
            }
            for t in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return tools
