"""Conversations with an environment, acted in by chance: what a tiny model is shown before it learns by itself."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from astraflow.config.rooms import choose
from astraflow.errors import SourceError
from astraflow.sources.splits import check_row, digest
from astraflow.types import Action, Step, Task

_ID = "call"


class PlayedSource:
    """Row i is `{messages, tools}`: one episode of `environment`, each reply drawn from `actions` by their weights. In
    one that has a tool with one parameter, a reply is a call of it."""

    def __init__(
        self, *, environment: str | Mapping[str, Any], actions: Mapping[str, float], size: int = 3200,
        longest: int = 10, seed: int = 0, tasks: str | Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`environment`: one whose step is a plain function. `size`: rows. `longest`: replies. `seed`: of the replies.
        `tasks`: a source whose rows are played one after the other, again from the first after the last; None: seeds.

        Raises: SourceError, Problem or ConfigError: what cannot be.
        """
        if not actions or min(actions.values()) < 0 or not sum(actions.values()):
            raise SourceError("sources.played.actions", dict(actions), "must be words with weights", "{ left = 1.0 }")
        if size < 1 or longest < 1:
            raise SourceError("sources.played.size", f"{size}, longest={longest}", "must be >= 1", "use the defaults")
        self._chosen = choose("environments", environment, "sources.played.environment")
        if inspect.iscoroutinefunction(self._chosen.make().step):
            fix = "use one whose step is a plain function"
            raise SourceError("sources.played.environment", self._chosen.type, "waits for somebody else", fix)
        self._actions, self._size, self._longest, self._seed = dict(actions), size, longest, seed
        self._tasks = choose("sources", tasks or {"type": "seeds", "size": size}, "sources.played.tasks").make()
        self._facts = repr((environment, sorted(actions.items()), size, longest, seed, self._tasks.fingerprint()))

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.played", index, self._size)
        chance = random.Random(f"{self._seed}/{index}")
        world = self._chosen.make()
        said = world.reset(Task("played", index, 0, self._tasks.row(index % len(self._tasks))))
        text = said.text if isinstance(said, Step) else said
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        for turn in range(1, self._longest + 1):
            (word,) = chance.choices(list(self._actions), list(self._actions.values()))
            reply, action = _said(word, world.tools)
            messages.append(reply)
            step = world.step(structs.replace(action, turn=turn))
            if step.done or turn == self._longest:
                break
            told = {"role": "tool", "tool_call_id": _ID} if world.tools else {"role": "user"}
            messages.append({**told, "content": step.text})
        world.close()
        return {"messages": messages, "tools": world.tools} if world.tools else {"messages": messages}

    def fingerprint(self) -> str:
        return digest("played", 1, self._facts)


def _said(word: str, tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], Action]:
    """A reply, and the action that it is."""
    if not tools:
        return {"role": "assistant", "content": word}, Action(text=word)
    function = tools[0]["function"]
    (argument,) = function["parameters"]["properties"]
    arguments = {argument: word}
    written = {"name": function["name"], "arguments": msgspec.json.encode(arguments).decode()}
    call = {"id": _ID, "type": "function", "function": written}
    return {"role": "assistant", "content": None, "tool_calls": [call]}, Action(
        tool=written["name"], arguments=arguments
    )
