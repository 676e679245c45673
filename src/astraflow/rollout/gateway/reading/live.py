"""One reply while it is sampled: tokens in, events out.

token -> whole characters -> before a stop string? -> content, reasoning or tool call -> events
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from astraflow.rollout.gateway.calls.events import Event, Reasoning, Text, ToolDelta
from astraflow.rollout.gateway.dialect import TokenLogprob, ToolCall
from astraflow.rollout.gateway.reading.decoding import TextStream
from astraflow.rollout.gateway.reading.stops import StopScanner
from astraflow.rollout.gateway.tools import Piece, ReplyReader, Thought
from astraflow.types import FinishReason, Generation

LogprobRow = Callable[[int, float], TokenLogprob]
"""(token id, logprob) -> its row in the reply."""


class Words(msgspec.Struct):
    """What a reply consists of."""

    text: str = ""  # all of it, as the policy wrote it, without its EOS
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []
    stop: str | None = None  # the stop string that was met

    def add(self, pieces: list[Piece]) -> None:
        """More of it, as a reader gives it."""
        for piece in pieces:
            if isinstance(piece, str):
                self.content += piece
            elif isinstance(piece, Thought):
                self.reasoning += piece.text
            else:
                self.calls.append(piece)


class LiveReply:
    """`stopped`: no token after the last one fed belongs to the reply (a stop string, or the only call that may be)."""

    __slots__ = (
        "_choice", "_only_call", "_reader", "_row", "_rows", "_scanner", "_stream", "_tokens", "one_call", "stopped",
        "words",
    )  # fmt: skip

    def __init__(self, choice: int, stream: TextStream, scanner: StopScanner, reader: ReplyReader) -> None:
        self._choice, self._stream, self._scanner, self._reader = choice, stream, scanner, reader
        self.one_call = False  # the reply ends with its first tool call
        self._only_call = False  # so it has
        self._row: LogprobRow | None = None
        self._rows: list[TokenLogprob] = []  # of tokens that no event brought yet
        self._tokens: list[tuple[int, float, int]] = []
        self.words = Words()
        self.stopped = False

    def __len__(self) -> int:
        return len(self._tokens)

    def feed(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> list[Event]:
        """What they say. Tokens after a stop are left out."""
        events: list[Event] = []
        for token in zip(ids, logprobs, versions, strict=True):
            if self.stopped:
                break
            self._tokens.append(token)
            if self._row is not None:
                self._rows.append(self._row(token[0], token[1]))
            text = self._stream.feed(token[0])
            if text:
                events += self._say(text)
        return events

    def feed_rest(self, generation: Generation) -> list[Event]:
        """The tokens of a finished generation that were not handed out before it."""
        rest = slice(len(self._tokens), None)
        columns = (generation.token_ids[rest], generation.logprobs[rest], generation.versions[rest])
        return self.feed(*(column.tolist() for column in columns))

    def end(self) -> list[Event]:
        """What was held back. The reply may have been cut."""
        events: list[Event] = []
        if not self.stopped and (text := self._stream.end()):
            events = self._say(text)
        if not self.stopped and (text := self._scanner.end()):
            self.words.text += text
            events += self._read(self._reader.feed(text))
        return events if self._only_call else events + self._read(self._reader.end())

    def with_logprobs(self, row: LogprobRow) -> None:
        """Events bring the logprobs of their tokens."""
        self._row = row

    def rest_of_logprobs(self) -> list[TokenLogprob]:
        """Those that no event brought."""
        rows, self._rows = self._rows, []
        return rows

    @property
    def num_malformed(self) -> int:
        """Tool calls that were begun and could not be read."""
        return self._reader.num_malformed

    def generation(self, reason: FinishReason) -> Generation:
        """The tokens that were fed."""
        ids, logprobs, versions = zip(*self._tokens, strict=True) if self._tokens else ((), (), ())
        return Generation(np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32), reason)

    def _say(self, text: str) -> list[Event]:
        passed = self._scanner.feed(text)
        if self._scanner.found is not None:
            self.stopped, self.words.stop = True, self._scanner.found
        self.words.text += passed
        return self._read(self._reader.feed(passed)) if passed else []

    def _read(self, pieces: list[Piece]) -> list[Event]:
        if self.one_call:
            first = next((n for n, piece in enumerate(pieces) if isinstance(piece, ToolCall)), None)
            if first is not None:
                pieces = pieces[: first + 1]
                self.stopped = self._only_call = True
        number = len(self.words.calls)
        self.words.add(pieces)
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, str):
                events.append(Text(self._choice, piece, self.rest_of_logprobs()))
            elif isinstance(piece, Thought):
                events.append(Reasoning(self._choice, piece.text, self.rest_of_logprobs()))
            else:
                function = piece.function
                events.append(
                    ToolDelta(
                        self._choice, number, piece.id, function.name, function.arguments, self.rest_of_logprobs()
                    )
                )  # fmt: skip
                number += 1
        return events
