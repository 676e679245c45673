"""A program that plays episodes beside a worker: lines of JSON to it and from it, many episodes at once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from astraflow.config.env import child_environment
from astraflow.errors import EpisodeError

log = logging.getLogger("astraflow.workflow")
_MAX_LINE = 1 << 24
_SHOWN = 2000  # characters of what it said on standard error


class Told(msgspec.Struct):
    """A line from it."""

    tasks: int = 0
    problem: str = ""
    id: int = -1
    reward: float | None = None
    metrics: dict[str, float] = {}
    error: str = ""


class Side:
    """The program; started with the first episode, and again after it ended. Lives on one event loop."""

    def __init__(self, argv: Sequence[str], start_s: float) -> None:
        self._argv, self._start_s = list(argv), start_s
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Told]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._begin = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._errors = b""

    async def play(self, asked: Mapping[str, Any]) -> Told:
        """What it says of an episode. Raises: EpisodeError: env_error."""
        async with self._begin:
            process = self._process or await self._start()
        number = next(self._numbers)
        answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._write(process, {"id": number, **asked})
            told = await answer
        except asyncio.CancelledError:
            self._write(process, {"id": number, "cancel": True})
            raise
        finally:
            self._waiting.pop(number, None)
        if told.error:
            raise EpisodeError(f"env_error: {told.error}")
        return told

    async def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            await _ended(process)
        if self._reading is not None:
            await self._reading

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv, stdin=pipe, stdout=pipe, stderr=pipe, limit=_MAX_LINE, env=child_environment(None),
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EpisodeError(f"env_error: {self._argv[0]} does not start: {error}") from error
        self._errors = b""
        errors = asyncio.create_task(self._keep_errors(process))
        try:
            async with asyncio.timeout(self._start_s):
                first = _read(await process.stdout.readline()) if process.stdout else None
        except TimeoutError:
            await _ended(process)
            await asyncio.gather(errors, _rest(process))
            raise EpisodeError(f"env_timeout: {self._argv[1]} was not ready in {self._start_s:g} s") from None
        if first is None or not first.tasks:
            await _ended(process)
            await asyncio.gather(errors, _rest(process))
            why = first.problem if first is not None and first.problem else self._errors.decode(errors="replace")
            raise EpisodeError(f"env_error: {self._argv[1]} did not begin: {why.strip()[-_SHOWN:]}")
        self._process = process
        self._reading = asyncio.create_task(self._read_all(process, errors))
        return process

    async def _read_all(self, process: asyncio.subprocess.Process, errors: asyncio.Task[None]) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            told = _read(line)
            if told is None:
                log.warning("%s said what is no answer: %r", self._argv[1], line[:80])
            elif (answer := self._waiting.get(told.id)) is not None and not answer.done():
                answer.set_result(told)
        status = await process.wait()
        await errors
        if self._process is process:
            self._process = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(Told(error=f"its program ended (exit {status})"))

    async def _keep_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while piece := await process.stderr.read(1 << 16):
            self._errors = (self._errors + piece)[-_SHOWN:]

    def _write(self, process: asyncio.subprocess.Process, line: Mapping[str, Any]) -> None:
        if process.stdin is not None and process.returncode is None:
            process.stdin.write(msgspec.json.encode(line) + b"\n")


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill it, and what it started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    await process.wait()


async def _rest(process: asyncio.subprocess.Process) -> bytes:
    """To the end of its output, so that its pipe is closed."""
    return await process.stdout.read() if process.stdout is not None else b""


def _read(line: bytes) -> Told | None:
    try:
        return msgspec.json.decode(line, type=Told)
    except msgspec.DecodeError as error:
        log.debug("no JSON: %s", error)
        return None
