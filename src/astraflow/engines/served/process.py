"""The server of an engine: started and ended by the node, or one that runs already."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from astraflow.engines.launching import Said, explained
from astraflow.engines.served.server import Server
from astraflow.errors import EngineError, LaunchError
from astraflow.observe.redact import redact_text
from astraflow.wire.streams.web import Lost, Refused, Web

log = logging.getLogger(__name__)
_ASK_S, _POLL_S = 5.0, 0.1
_END_S = 5.0  # from SIGTERM to SIGKILL
_LOOKED_BYTES, _TAIL_LINES, _LINE = 1 << 20, 12, 400
_ERRORS = 3  # at most, of those that the log names before its last lines
_ERROR = re.compile(r"\b(?:\w*(?:Error|Exception)\b|error)\s*: .+")


class Host(Protocol):
    """Where a server comes from."""

    starts_with_ours: bool
    """A server that it has started has the weights of the engine's file."""

    async def start(self) -> Server:
        """One that answers. Raises: EngineError or LaunchError: none does; what to do."""

    def ended(self) -> str | None:
        """How its process ended; None: it runs, or cannot be looked at."""

    def tail(self) -> str:
        """The last lines of its log, "": none is known."""

    def fix(self, how: str) -> str:
        """What to do about a server that ended so and says what it says."""

    async def stop(self) -> None:
        """End it if it is ours."""

    async def close(self) -> None:
        """`stop`, and leave nothing behind."""


class Command:
    """How a kind of server is started on a port."""

    def __init__(
        self, kind: str, argv: Callable[[int], Sequence[str]], environment: Mapping[str, str],
        open_server: Callable[[Web], Server], said: Sequence[Said],
    ) -> None:  # fmt: skip
        """`said`: what lines of its log mean."""
        self.kind, self.argv, self.environment = kind, argv, environment
        self.open_server, self.said = open_server, said


class Launched:
    """A process of this host. It ends with the node, however the node ends: its standard input closes then."""

    starts_with_ours = True

    def __init__(self, command: Command, port: int, ready_s: float, key: str | None = None) -> None:
        """`port`: 0 takes a free one at each start. `ready_s`: from start to the first answer."""
        self._command, self._port, self._ready_s, self._key = command, port, ready_s, key
        handle, name = tempfile.mkstemp(prefix=f"astraflow-{command.kind}-{os.getpid()}-", suffix=".log")
        os.close(handle)
        self.log_file, self._log_begin = Path(name), 0
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> Server:
        """Raises: EngineError: it will end so at every start. LaunchError: it was not ready in time."""
        port = self._free_port()
        began = time.monotonic()
        self._process = self._open(port)
        log.info("%s starts on port %d, log %s", self._command.kind, port, self.log_file)
        web = Web(f"http://127.0.0.1:{port}", self._key)
        while (left_s := self._ready_s - (time.monotonic() - began)) > 0:
            if (how := self.ended()) is not None:
                await self.stop()
                raise self._failed(how)
            if await answers(web, left_s):
                log.info("%s is ready after %.1f s", self._command.kind, time.monotonic() - began)
                return self._command.open_server(web)
            await asyncio.sleep(_POLL_S)
        await self.stop()
        raise LaunchError(
            self._command.kind, f"{self._ready_s:g} s", f"passed without an answer; {self.tail()}",
            "raise engine.ready_s if it only needs longer",
        )  # fmt: skip

    def ended(self) -> str | None:
        """By a signal or with a code."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def tail(self) -> str:
        """Without secrets. Errors before the last lines too: those may be of a process that waited for another one."""
        try:
            lines = self._lines()
        except OSError as error:  # temporary files are cleared away at times
            return f"its log {self.log_file} cannot be read ({error.strerror})"
        if not lines:
            return f"its log {self.log_file} is empty"
        last = "\n".join(lines[-_TAIL_LINES:])
        before = [error for error in _errors(lines) if error not in last][:_ERRORS]
        above = "errors before them:\n" + "\n".join(before) + "\n" if before else ""
        return f"{above}last lines of {self.log_file}:\n{last}\n"

    def fix(self, how: str) -> str:
        """As far as its log says why."""
        return self._explained(how)[1]

    async def stop(self) -> None:
        """SIGKILL to it and all its children: it may hang."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal(process, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.to_thread(process.wait, _END_S)

    async def close(self) -> None:
        """SIGTERM first. The log stays where the server failed."""
        clean = self._process is not None and self.ended() is None
        if clean and self._process is not None:
            _signal(self._process, signal.SIGTERM)
            try:
                await asyncio.to_thread(self._process.wait, _END_S)
            except subprocess.TimeoutExpired:
                log.info("%s does not end by SIGTERM", self._command.kind)
        await self.stop()
        if clean:
            self.log_file.unlink(missing_ok=True)

    def _open(self, port: int) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as output:
            self._log_begin = output.tell()
            return subprocess.Popen(
                list(self._command.argv(port)), stdin=subprocess.PIPE, stdout=output, stderr=output,
                env=dict(self._command.environment), start_new_session=True,
            )  # fmt: skip

    def _free_port(self) -> int:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", self._port))
            except OSError as error:
                raise EngineError(
                    "engine.port", self._port, f"cannot be had ({error.strerror})",
                    "end what uses it, or leave engine.port out for a free one",
                ) from error  # fmt: skip
            number: int = sock.getsockname()[1]
            return number

    def _failed(self, how: str) -> EngineError:
        rule, fix = self._explained(how)
        return EngineError(self._command.kind, how, f"at its start: {rule}; {self.tail()}", fix)

    def _explained(self, how: str) -> tuple[str, str]:
        """(rule, fix): by the last lines, else by what the log names as an error, else by how it ended."""
        try:
            lines = self._lines()
        except OSError:  # `tail` says so
            lines = []
        for said in ("\n".join(lines[-_TAIL_LINES:]), "\n".join(_errors(lines)), how):
            if (found := explained(said, self._command.said)) is not None:
                return found
        return how, "see its log"

    def _lines(self) -> list[str]:
        """Of this life, the newest. Raises: OSError."""
        with self.log_file.open("rb") as file:
            file.seek(max(self._log_begin, self.log_file.stat().st_size - _LOOKED_BYTES))
            text = redact_text(file.read().decode(errors="replace").strip())
        return [line[:_LINE] for line in text.splitlines()]


class Attached:
    """A server that somebody else runs."""

    starts_with_ours = False

    def __init__(self, kind: str, url: str, open_server: Callable[[Web], Server], ready_s: float, key: str | None):
        self._kind, self._url, self._ready_s = kind, url, ready_s
        self._open_server, self._key = open_server, key

    async def start(self) -> Server:
        """Waits for it. Raises: LaunchError: it does not answer."""
        web, began = Web(self._url, self._key), time.monotonic()
        while (left_s := self._ready_s - (time.monotonic() - began)) > 0:
            if await answers(web, left_s):
                return self._open_server(web)
            await asyncio.sleep(_POLL_S)
        raise LaunchError(
            "engine.url", self._url, f"gave no answer within {self._ready_s:g} s",
            f"start the {self._kind} server there, or raise engine.ready_s",
        )  # fmt: skip

    def ended(self) -> str | None:
        """Unknown."""
        return None

    def tail(self) -> str:
        """Unknown."""
        return ""

    def fix(self, how: str) -> str:
        """Unknown."""
        return "see its log, where it runs"

    async def stop(self) -> None:
        """It is not ours."""

    async def close(self) -> None:
        """It is not ours."""


def _errors(lines: Sequence[str]) -> list[str]:
    """What they name as an error, each once, without what stands before it."""
    found = (match.group() for line in lines if (match := _ERROR.search(line)) is not None)
    return list(dict.fromkeys(found))


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To its whole group."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        log.debug("process %d is gone", process.pid)


async def answers(web: Web, within_s: float) -> bool:
    """Its `/health` says that it is well."""
    try:
        await web.ask("GET", "/health", within_s=min(within_s, _ASK_S))
    except (Lost, Refused):
        return False
    return True
