"""What serves one policy behind the gateway: an engine, the policy's chat template, and a reader of tool calls."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from copy import copy
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash

from astraflow.contracts import Engine
from astraflow.rollout.gateway.calls.options import check_tools
from astraflow.rollout.gateway.tools import ToolParser
from astraflow.types import EpisodeLease, Message

Tools = list[dict[str, Any]] | None
K = TypeVar("K")
V = TypeVar("V")
_KEPT_TEXTS, _KEPT_CHARS = 2048, 4096  # at most, and the longest that is kept: bounds the memory


class Chat(Protocol):
    """A tokenizer and its chat template (`models.chat.ChatTokenizer`)."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """The ids that end a turn; may be empty."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """The template's text, special tokens included."""

    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """[T] int32 ids of a rendered text: special tokens are read, none is added."""

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Text of [T] ids."""


class PolicyEndpoint:
    """One policy as the gateway serves it. Shared by all episodes of a node."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        tool_parser: ToolParser,
        max_context: int | None = None,
        agents_choose: Iterable[str] = (),
        others: Sequence[Engine] = (),
    ) -> None:
        """`max_context`: longest prompt plus reply in tokens, None: the engine's; `agents_choose`: sampling parameters
        that follow the agent's request instead of the run file; `others`: engines with other versions of the policy."""
        self.engines = (engine, *others)
        self.engine, self.chat, self.tool_parser = engine, chat, tool_parser
        self.agents_choose = frozenset(agents_choose)
        self.max_context = engine.max_context if max_context is None else min(max_context, engine.max_context)
        self.eos_texts = {int(i): chat.decode([int(i)], skip_special_tokens=False) for i in chat.eos_ids}
        self._texts: dict[Hashable, tuple[Tools, str]] = {}
        self._ids: dict[str, np.ndarray] = {}
        self._good_tools: dict[bytes, None] = {}

    def of(self, lease: EpisodeLease) -> PolicyEndpoint:
        """As it serves an episode: by one of its engines that have weights, the same for all of a group as long as
        these have the same versions."""
        if len(self.engines) == 1:
            return self
        ready = [engine for engine in self.engines if engine.version >= 0] or self.engines[:1]
        chosen = copy(self)
        chosen.engine = ready[xxhash.xxh3_64_intdigest(lease.group_id.encode()) % len(ready)]
        return chosen

    def _check_tools(self, tools: list[dict[str, Any]]) -> None:
        """Equal tools are looked at once."""
        key = xxhash.xxh3_128_digest(msgspec.json.encode(tools))
        if key not in self._good_tools:
            check_tools(tools)
            _keep(self._good_tools, key, None)

    def encode(self, text: str) -> np.ndarray:
        """[T] int32 ids of `text`, not to be written to. Short texts are kept: siblings of a task ask for the same."""
        ids = self._ids.get(text)
        if ids is None:
            ids = np.asarray(self.chat.encode(text), dtype=np.int32)
            ids.setflags(write=False)
            if len(text) <= _KEPT_CHARS:
                _keep(self._ids, text, ids)
        return ids

    def render(self, key: Hashable, messages: Sequence[Message], tools: Tools) -> str:
        """The text of a request. `key`: equal for equal messages; short texts are kept, as siblings say the same.

        Raises: GatewayError (400): tools that are none. ModelError: the template refuses the messages.
        """
        found = self._texts.get(key)
        if found is not None and found[0] == tools:
            return found[1]
        if tools:
            self._check_tools(tools)
        text = self.chat.render(messages, tools, add_generation_prompt=True)
        if len(text) <= _KEPT_CHARS:
            _keep(self._texts, key, (tools, text))
        return text


def _keep(cache: dict[K, V], key: K, value: V) -> None:
    if len(cache) >= _KEPT_TEXTS:
        del cache[next(iter(cache))]
    cache[key] = value
