"""What user code writes to standard output and error: bounded where it is written, and where it is kept.

| where         | what                                       | when it is too much                                |
|---------------|--------------------------------------------|----------------------------------------------------|
| in the worker | what Python code of one episode writes     | the episode ends with the error "output"           |
| in the node   | all that comes through the worker's pipe   | the rest of it is left out of the log, and counted |
| in the node   | more than `max_per_s`: libraries, children | the worker is killed: `on_flood`                   |
"""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TextIO

from astraflow.errors import EpisodeError

log = logging.getLogger("astraflow.node")
_BURST_BYTES, _BYTES_PER_S = 256 << 10, 8 << 10  # of one worker, that the log takes at once and after that
_MAX_LINE_BYTES = 16 << 10
_budget: ContextVar[Budget | None] = ContextVar("output of this episode", default=None)


class Budget:
    """How much one episode may write. `over`: it wrote more; every further write raises."""

    def __init__(self, most: int, on_over: Callable[[], object]) -> None:
        """`on_over`: called once, in whatever thread wrote."""
        self.over = False
        self._most, self._left, self._on_over = most, most, on_over

    @property
    def error(self) -> str:
        return f"output: the episode wrote more than {self._most} bytes; log less, or raise workflow.max_output_bytes"

    def __enter__(self) -> None:
        """What this task and the threads that take its context write counts."""
        self._before = _budget.set(self)

    def __exit__(self, *failure: object) -> None:
        _budget.reset(self._before)

    def spend(self, count: int) -> None:
        """Raises: EpisodeError: too much."""
        self._left -= count
        if self._left >= 0:
            return
        if not self.over:
            self.over = True
            self._on_over()
        raise EpisodeError(self.error)


class _Counted(io.TextIOBase):
    """A text stream whose writes count."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.buffer = stream.buffer  # for those who write bytes; the node bounds these

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if (budget := _budget.get()) is not None:
            budget.spend(len(text))
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def count_output() -> None:
    """From now on episodes of this process pay for what they write. Lines appear at once, and whatever they hold."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    sys.stdout, sys.stderr = _Counted(sys.stdout), _Counted(sys.stderr)


class Drain(asyncio.Protocol):
    """Reads a worker's pipe, so that it never blocks there; whole lines go to `write` as far as the log takes them."""

    def __init__(
        self, name: str, max_per_s: int, on_flood: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._max_per_s, self._on_flood, self._clock = name, max_per_s, on_flood, clock
        self._transport: asyncio.BaseTransport | None = None
        self._line = b""
        self._tokens, self._at = float(_BURST_BYTES), clock()
        self._second, self._count = clock(), 0
        self.num_left_out = 0
        self.ended = asyncio.Event()
        self._told = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if now - self._second >= 1.0:
            self._second, self._count = now, 0
        self._count += len(data)
        if self._count > self._max_per_s:
            self._on_flood()
        *lines, rest = (self._line + data).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._line = rest
        if lines:
            self._keep(b"\n".join(lines) + b"\n", now)

    def connection_lost(self, error: Exception | None) -> None:
        if self._line:
            self._keep(self._line + b"\n", self._clock())
            self._line = b""
        self.tell()
        self.ended.set()

    def close(self) -> None:
        """Read no more; the worker is gone, what it started may still hold the pipe."""
        if self._transport is not None:
            self._transport.close()

    def tell(self) -> None:
        """Say what was left out since the last time."""
        if self.num_left_out > self._told:
            log.warning(
                "%s wrote too much: %d bytes are left out of this log", self._name, self.num_left_out - self._told
            )
            self._told = self.num_left_out

    def _keep(self, text: bytes, now: float) -> None:
        self._tokens = min(float(_BURST_BYTES), self._tokens + _BYTES_PER_S * (now - self._at))
        self._at = now
        if len(text) > self._tokens:
            self.num_left_out += len(text)
            return
        self._tokens -= len(text)
        _write(text.decode("utf-8", "backslashreplace"))


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError) as error:  # neither a full disk nor a closed stream may end a node by way of its log
        log.debug("output of a worker is lost (%s)", error)
