"""What an engine asks of a server, whatever its kind: one class for each kind, in the folder of that kind."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from astraflow.errors import EngineError
from astraflow.types import Sampling

R = TypeVar("R")
UNLABELLED = "default"  # what vLLM and SGLang call the weights that they were started with


@dataclass(frozen=True, kw_only=True)
class Model:
    """What an engine knows of its model beside the weights."""

    stop_ids: Sequence[int]  # EOS
    vocab_size: int
    max_context: int = 0  # 0: the server's


class Ask(msgspec.Struct, frozen=True):
    """One generation, or what is left of one."""

    request_id: str  # its own, also when a generation goes on elsewhere
    token_ids: np.ndarray  # [P] int32, prompt and what was sampled before
    sampling: Sampling
    max_tokens: int
    stop_token_ids: Sequence[int]  # EOS included: nothing else ends it but the length


class Span(msgspec.Struct, frozen=True):
    """Sampled tokens [start, end) of one request are of `version`."""

    version: int
    start: int
    end: int


class Piece(msgspec.Struct, frozen=True):
    """More of a generation. ids and logprobs have equal length."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None  # "stop" or "length" in the last piece
    spans: list[Span] | None = None  # in the last piece: what the server says of all tokens; None: it does not say


class Comparison(msgspec.Struct, frozen=True):
    """The weights that a server's forward pass uses, beside those of a file."""

    compared: int
    differing: Sequence[str] = ()
    unknown: Sequence[str] = ()  # could not be looked at


class Server(Protocol):
    """A server that answers. Raises of all methods: `web.Lost`, `web.Refused`."""

    counts: bool
    """At a pause it says how many tokens each generation has sampled. False: a pause ends generations, and what is left
    of them is asked for again, so that each asking is of one version."""

    async def look(self) -> int:
        """Longest prompt plus generation in tokens. Raises: EngineError: it lacks something that an engine needs."""

    def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """As it is sampled. Closing the iterator ends the generation at the server."""

    async def pause(self) -> Mapping[str, int]:
        """From here on nothing is sampled. Gives how many tokens each unfinished request has sampled, by the id of its
        `Ask`; nothing of a server that does not count."""

    async def load(self, path: Path, version: int) -> None:
        """Take the weights of the file; caches of older ones are gone. Paused."""

    async def resume(self) -> None:
        """Go on."""

    async def label(self, version: int) -> None:
        """The weights that it was started with are of `version`."""

    async def compare(self, path: Path) -> Comparison:
        """Look at the weights that it uses."""

    async def gauges(self) -> dict[str, float]:
        """How busy it is: server_running, server_waiting, kv_usage (0 to 1). Also how it is known to be alive."""


def version_of(name: str, label: str) -> int:
    """The version that a server of this name says, -1 where it is that of its start. Raises: EngineError."""
    if label == UNLABELLED:
        return -1
    try:
        return int(label)
    except ValueError as error:
        raise EngineError(
            f"{name} weight version", label, "is not one of ours", "let nobody else change the server's weights"
        ) from error


def decoded(name: str, fix: str, content: bytes, kind: type[R]) -> R:
    """What a server of this name answered. Raises: EngineError: something else."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        shown = content[:200].decode(errors="replace")
        raise EngineError(f"{name} answer", shown, f"cannot be read ({error})", fix) from error
