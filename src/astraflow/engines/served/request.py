"""One generation on its way, perhaps through several lives of a server, and the version of each of its tokens.

A server says at each pause how many tokens a request has sampled. Those are of the version before, also the ones that
are still on their way to us, and all later ones of the version after: so each token gets its label exactly, when it
arrives. What the server says of all of them at the end must be the same.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from astraflow.contracts import TokenSink
from astraflow.engines.served.server import Piece, Span
from astraflow.errors import EngineError
from astraflow.types import FinishReason, Generation, Sampling


@dataclass(slots=True, eq=False)
class Request:
    """Lives on the engine's loop."""

    request_id: str
    prompt_ids: np.ndarray  # [P] int32
    sampling: Sampling
    max_tokens: int
    future: Future[Generation]
    on_tokens: TokenSink | None = None
    task: asyncio.Task[None] | None = None
    server_id: str = ""  # under which a server knows it now
    losses: int = 0  # how often its server was lost
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    _begin: int = 0  # tokens that it had when it was asked for
    _bounds: list[tuple[int, int]] = field(default_factory=list)  # (tokens since `_begin`, version from there on)

    def ask(self, version: int) -> None:
        """A server is asked for what is missing, under `version`."""
        self.server_id = uuid.uuid4().hex
        self._begin, self._bounds = len(self.token_ids), [(0, version)]

    @property
    def has_left(self) -> bool:
        """No server is to answer it now; what still comes of an earlier life is not looked at."""
        return not self.server_id

    def leave(self) -> None:
        """The server that was asked will not end it."""
        self.server_id = ""

    def swapped(self, sampled: int, version: int) -> None:
        """The server had sampled so many tokens of this life when its weights became `version`."""
        self._bounds.append((sampled, version))

    def add(self, piece: Piece) -> None:
        """More tokens have come; they are handed on.

        Raises: EngineError: the server says other versions than were counted.
        """
        first = len(self.versions)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += [self._version(at - self._begin) for at in range(first, len(self.token_ids))]
        if self.on_tokens is not None and piece.token_ids:
            self.on_tokens(piece.token_ids, piece.logprobs, self.versions[first:])
        if piece.spans is not None:
            self._check(piece.spans)

    def generation(self, reason: FinishReason) -> Generation:
        """What there is of it."""
        return Generation(
            np.array(self.token_ids, np.int32), np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32), reason,
        )  # fmt: skip

    def _version(self, index: int) -> int:
        return next(version for start, version in reversed(self._bounds) if index >= start)

    def _check(self, spans: Sequence[Span]) -> None:
        said = [span.version for span in spans for _ in range(span.start, span.end)]
        if said != self.versions[self._begin :]:
            told = [(span.version, span.start, span.end) for span in spans]
            raise EngineError(
                "weight versions", told, f"of the server are not those counted at its pauses ({self._bounds})",
                "report it: a token must not have a wrong label",
            )  # fmt: skip
