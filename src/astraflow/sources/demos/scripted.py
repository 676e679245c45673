"""Demonstrations: what a workflow says around the replies of a script."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from astraflow.config.rooms import choose
from astraflow.errors import SourceError
from astraflow.sources.splits import check_row, digest
from astraflow.types import Message, Task

_WHERE = "sources.scripted"


class _Reply(msgspec.Struct):
    """What workflows read of a reply."""

    content: str
    tool_calls: list[Any] = []
    finish_reason: str = "stop"
    usage: dict[str, int] = {}

    def __str__(self) -> str:
        return self.content

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.content}


class _Script:
    """The client of the policy."""

    base_url = api_key = ""

    def __init__(self, replies: Sequence[str]) -> None:
        self.left, self.count, self.messages = list(replies), len(replies), list[Message]()

    async def chat(self, messages: Sequence[Message], **_: Any) -> _Reply:
        if not self.left:
            fix = "give as many as an episode takes, the last of which ends it"
            raise SourceError(f"{_WHERE}.replies", self.count, "are too few", fix)
        reply = _Reply(self.left.pop(0))
        self.messages = [*messages, reply.message]
        return reply


class ScriptedSource:
    """Row i is `{messages}`: an episode of `workflow` with row i of `tasks`, in which the policy says `replies`."""

    def __init__(
        self, *, tasks: str | Mapping[str, Any], workflow: str | Mapping[str, Any], replies: Sequence[str],
        right: float = 1.0, policy: str = "actor", seed: int = 0,
    ) -> None:  # fmt: skip
        """`tasks`: a source. `workflow`: a coroutine function, of one `policy` that acts by what it says. `replies`: in
        their order, with fields of the task as `{question}` or `{answers[0]}`; in a share 1 - `right` of the rows the
        last one has those of another row.

        Raises: SourceError, Problem or ConfigError: what cannot be.
        """
        if not replies or isinstance(replies, str):
            raise SourceError(f"{_WHERE}.replies", replies, "must be a list of texts", "give one for each turn")
        if not 0.0 <= right <= 1.0:
            raise SourceError(f"{_WHERE}.right", right, "must be a share from 0 to 1", "give 1.0, say")
        self._tasks = choose("sources", tasks, f"{_WHERE}.tasks").make()
        self._play = choose("workflows", workflow, f"{_WHERE}.workflow").make()
        self._replies, self._right, self._policy, self._seed = list(replies), right, policy, seed
        self._facts = (self._tasks.fingerprint(), repr(workflow), self._replies, right, policy, seed)

    def __len__(self) -> int:
        return len(self._tasks)

    def row(self, index: int) -> dict[str, Any]:
        """Raises: SourceError: the workflow takes another number of replies."""
        check_row(_WHERE, index, len(self))
        task = Task("scripted", index, 0, self._tasks.row(index))
        script = _Script(self._said(index, task.fields))
        with ThreadPoolExecutor(1) as thread:  # whoever asks may have a loop of its own
            thread.submit(asyncio.run, self._play(task, {self._policy: script})).result()
        if script.left:
            fix = "give as many as an episode takes"
            raise SourceError(f"{_WHERE}.replies", len(self._replies), f"are {len(script.left)} too many", fix)
        return {"messages": script.messages}

    def _said(self, index: int, fields: dict[str, Any]) -> list[str]:
        chance = random.Random(f"{self._seed}/{index}")
        last = fields if chance.random() < self._right else self._tasks.row(chance.randrange(len(self)))
        try:
            return [*(text.format_map(fields) for text in self._replies[:-1]), self._replies[-1].format_map(last)]
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            known = f"a task has {', '.join(fields)}; write a brace as {{{{ or }}}}"
            raise SourceError(f"{_WHERE}.replies", self._replies, f"cannot be filled ({error!r})", known) from error

    def fingerprint(self) -> str:
        return digest("scripted", 1, *self._facts)
