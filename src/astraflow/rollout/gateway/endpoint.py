"""What serves one policy behind the gateway: an engine, the policy's chat template, and a reader of tool calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from astraflow.contracts import Engine
from astraflow.rollout.gateway.tools import ToolParser
from astraflow.types import Message

Tools = list[dict[str, Any]] | None
_KEPT_PROMPTS = 64


class Chat(Protocol):
    """A tokenizer and its chat template (`models.chat.ChatTokenizer`)."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """The ids that end a turn; may be empty."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """The template's text, special tokens included."""

    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """Ids of a rendered text: special tokens are read, none is added."""

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Text of ids."""


class PolicyEndpoint:
    """One policy as the gateway serves it. Shared by all episodes of a node."""

    def __init__(self, engine: Engine, chat: Chat, tool_parser: ToolParser, max_context: int | None = None) -> None:
        """`max_context`: longest prompt plus reply in tokens; None: the engine's."""
        self.engine, self.chat, self.tool_parser = engine, chat, tool_parser
        self.max_context = engine.max_context if max_context is None else min(max_context, engine.max_context)
        self.eos_texts = {int(i): chat.decode([int(i)], skip_special_tokens=False) for i in chat.eos_ids}
        self._fresh: dict[Hashable, tuple[Tools, str, np.ndarray]] = {}

    def encode(self, text: str) -> np.ndarray:
        """Ids as int32."""
        return np.asarray(self.chat.encode(text), dtype=np.int32)

    def fresh_prompt(self, key: Hashable, messages: Sequence[Message], tools: Tools) -> tuple[str, np.ndarray]:
        """Text and ids of a conversation that continues nothing. The siblings of a task all ask for the same one,
        so the last ones are kept. `key`: equal for equal messages."""
        found = self._fresh.get(key)
        if found is not None and found[0] == tools:
            return found[1], found[2]
        text = self.chat.render(messages, tools, add_generation_prompt=True)
        ids = self.encode(text)
        ids.setflags(write=False)
        if len(self._fresh) >= _KEPT_PROMPTS:
            del self._fresh[next(iter(self._fresh))]
        self._fresh[key] = (tools, text, ids)
        return text, ids
