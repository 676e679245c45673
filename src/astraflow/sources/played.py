"""Conversations with an environment, acted in by chance: what a tiny model is shown before it learns by itself."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from typing import Any

from astraflow.config.rooms import choose
from astraflow.errors import SourceError
from astraflow.sources.splits import check_row, digest
from astraflow.types import Action, Step, Task


class PlayedSource:
    """Row i is `{messages}`: one episode of `environment`, each reply drawn from `actions` by their weights."""

    def __init__(
        self, *, environment: str | Mapping[str, Any], actions: Mapping[str, float], size: int = 3200,
        longest: int = 10, seed: int = 0,
    ) -> None:  # fmt: skip
        """`environment`: one that is acted in by text, and is cheap. `longest`: replies. `seed`: of the replies.

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
        self._facts = repr((environment, sorted(actions.items()), size, longest, seed))

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.played", index, self._size)
        chance = random.Random(f"{self._seed}/{index}")
        world = self._chosen.make()
        said = world.reset(Task("played", index, 0, {"seed": index}))
        text = said.text if isinstance(said, Step) else said
        messages: list[dict[str, Any]] = []
        for turn in range(1, self._longest + 1):
            (reply,) = chance.choices(list(self._actions), list(self._actions.values()))
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
            step = world.step(Action(text=reply, turn=turn))
            if step.done:
                break
            text = step.text
        world.close()
        return {"messages": messages}

    def fingerprint(self) -> str:
        return digest("played", 1, self._facts)
