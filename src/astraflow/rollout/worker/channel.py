"""What a node and its worker processes say to each other: msgpack frames over one socket pair.

| message | direction      | meaning                                                   | answered by |
|---------|----------------|-----------------------------------------------------------|-------------|
| Hello   | node -> worker | the workflow to build                                     | Ready       |
| Start   | node -> worker | play an episode                                           | Done        |
| Cancel  | node -> worker | stop an episode                                           | Done        |
| Ask     | worker -> node | one call: the body of an OpenAI chat completion           | Answer      |
| Drop    | worker -> node | the workflow no longer waits for this call                | -           |
| Pulse   | worker -> node | my loop turns                                             | -           |
| Loaded  | worker -> node | source files of the workflow that were imported           | -           |

A frame is a 4-byte little-endian length and a msgpack array. All frames of one loop turn leave in one send. Either
side sees the other's end by the end of the stream.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

from astraflow.errors import WireError
from astraflow.rollout.worker.code import SourceFile
from astraflow.types import Outcome, Task

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20


class Hello(msgspec.Struct, array_like=True, tag=1):
    """First frame."""

    workflow: str
    options: dict[str, Any]
    policies: list[str]
    base_url: str  # of the gateway over HTTP, for agents that bring their own client
    pulse_s: float
    files: list[SourceFile] = []  # run these in place of the files on disk
    max_output_bytes: int = 1 << 20  # that Python code of one episode may write


class Start(msgspec.Struct, array_like=True, tag=2):
    """Play `task`, for at most `timeout_s`."""

    slot: int  # names the episode on this channel, never used twice
    key: str  # of the episode at the gateway
    task: Task
    timeout_s: float


class Cancel(msgspec.Struct, array_like=True, tag=3):
    """Stop the episode; its Done is still sent."""

    slot: int


class Answer(msgspec.Struct, array_like=True, tag=4):
    """`body` is a chat completion when `status` is 200, else an OpenAI error object."""

    call: int
    status: int
    body: bytes


class Ready(msgspec.Struct, array_like=True, tag=5):
    """The workflow was built, or why not."""

    problem: str | None
    settings: bool = False  # the problem lies in the run file, so it will be there at every start
    code: str = ""  # version of the workflow's code
    trace: str = ""  # of the problem: its traceback


class Ask(msgspec.Struct, array_like=True, tag=6):
    """One LLM request of an episode."""

    slot: int
    call: int
    body: bytes


class Drop(msgspec.Struct, array_like=True, tag=9):
    """The episode goes on without this call: stop it; no Answer is wanted."""

    slot: int
    call: int


class Done(msgspec.Struct, array_like=True, tag=7):
    """The episode ended. Exactly one of `outcome` and `error` is given."""

    slot: int
    outcome: Outcome | None
    error: str | None
    left_running: bool  # True: a thread of it cannot be stopped and still runs
    code: str = ""  # version of the code that played it


class Pulse(msgspec.Struct, array_like=True, tag=8):
    """Sent every `pulse_s` while the worker's loop turns."""


class Loaded(msgspec.Struct, array_like=True, tag=10):
    """Sent before Ready, and when an episode imported more of them."""

    files: list[SourceFile]


Message = Hello | Start | Cancel | Answer | Ready | Ask | Drop | Done | Pulse | Loaded


class Channel(asyncio.Protocol):
    """One end. `on_message` is called for each frame in order, `on_lost` once when the other end is gone."""

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._encoder = msgspec.msgpack.Encoder()
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._outgoing = bytearray()
        self._incoming = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one without saying so

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, message: Message) -> None:
        """Queue a frame; it leaves at the end of this loop turn. Dropped when the other end is gone.

        Raises: WireError: it cannot be encoded or is too large; nothing is queued then.
        """
        outgoing = self._outgoing
        start = len(outgoing)
        if not start:
            self._loop.call_soon(self._flush)
        outgoing += b"\0\0\0\0"
        try:
            self._encoder.encode_into(message, outgoing, -1)
            size = len(outgoing) - start - 4
            _check_size(size)
        except Exception as error:
            del outgoing[start:]  # half a frame would garble all that follow
            raise WireError(
                f"message={type(message).__name__} cannot be sent ({type(error).__name__}: {error}); "
                "give plain numbers, text and lists of moderate size"
            ) from error
        _LENGTH.pack_into(outgoing, start, size)

    def close(self) -> None:
        """Hang up after what is queued."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, bytearray()
        if self._transport is not None and outgoing:
            self._transport.write(outgoing)

    def data_received(self, data: bytes) -> None:
        if self._incoming:
            data = self._incoming + data
        at, end = 0, len(data)
        view = memoryview(data)
        while end - at >= 4:
            (size,) = _LENGTH.unpack_from(data, at)
            _check_size(size)
            if end - at - 4 < size:
                break
            self._on_message(self._decode(view[at + 4 : at + 4 + size]))
            at += 4 + size
        self._incoming = data[at:]


def _check_size(size: int) -> None:
    if size > MAX_FRAME_BYTES:
        raise WireError(f"frame_bytes={size} must be <= {MAX_FRAME_BYTES}; send smaller messages in one call")
