"""The text of a reply while its tokens come: whole characters only, joined equal to decoding all of them at once.

Bytes that form no character are the exception: some decoders write those around them differently when all are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

_UNFINISHED = "�"  # what a decoder writes for bytes that are no character (yet)


class Decoder(Protocol):
    """The part of a chat tokenizer that is needed here."""

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Text of [T] ids."""


class TextStream:
    """A piece is decoded together with the piece before it, as a tokenizer may write a token differently at the start
    of a text, so the work per token does not grow with the reply."""

    __slots__ = ("_chat", "_context", "_ids", "_said", "_skip", "hidden")

    def __init__(self, chat: Decoder, hidden: frozenset[int], skip_special_tokens: bool) -> None:
        """`hidden`: ids that say nothing when they end the reply."""
        self._chat, self._skip, self.hidden = chat, skip_special_tokens, hidden
        self._ids: list[int] = []  # context, then what is not said yet
        self._context = 0  # ids of the context
        self._said = ""  # text of the context

    def feed(self, token: int) -> str:
        """The text that is complete with this token."""
        self._ids.append(token)
        if token in self.hidden:
            return ""
        text = self._chat.decode(self._ids, self._skip)
        if text.endswith(_UNFINISHED):
            return ""
        new = text[len(self._said) :]
        if new:
            del self._ids[: self._context]
            self._context = len(self._ids)
            self._said = self._chat.decode(self._ids, self._skip)
        return new

    def end(self) -> str:
        """The rest, bytes that became no character included."""
        if self._ids and self._ids[-1] in self.hidden:
            self._ids.pop()
        return self._chat.decode(self._ids, self._skip)[len(self._said) :]
