"""An operator that counts identical answers once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import leave_out, require
from astraflow.types import Group, Tokens

_encode = msgspec.json.Encoder(order="deterministic").encode


class Dedup(Operator):
    """Leaves out (unscored) every episode whose sampled tokens are those of an earlier one of its group.

    A group of copies looks like a group of opinions: the baseline and the loss count the same answer several times.
    Args: min_episodes: with fewer scored episodes left, the group is dropped as "dedup".
    window: also leave out answers that were given to the same task fields in the last `window` groups that passed
        here (other rows, other epochs); 0: only within a group. Its state is 16 bytes per episode remembered.
    """

    needs_tokens = True
    min_siblings = 2

    def __init__(self, *, min_episodes: int = 2, window: int = 0) -> None:
        require(min_episodes >= 1, "dedup.min_episodes", min_episodes, "must be >= 1", "use 2")
        require(0 <= window <= 100_000, "dedup.window", window, "must be 0 to 100000", "use 0 for within a group only")
        self._left, self._window = min_episodes, window
        self._recent: dict[str, list[str]] = {}  # group id -> marks of its answers to its task, oldest group first
        self._known: dict[str, int] = {}  # mark -> groups of `_recent` that have it

    def on_group(self, group: Group) -> Group | str:
        task = _encode(group.task.fields) if self._window else b""
        seen: set[str] = set()
        repeated = []
        for k, branches in enumerate(group.tokens or ()):
            if group.rewards[k] is None:
                continue
            mark = _mark(task, branches)
            if mark in seen or mark in self._known:
                repeated.append(k)
            seen.add(mark)
        if self._window:
            self._remember(group.group_id, sorted(seen))
        return leave_out(group, repeated, "dedup", self._left)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": {group_id: list(marks) for group_id, marks in self._recent.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent, self._known = {}, {}
        for group_id, marks in state.get("recent", {}).items():
            self._remember(group_id, marks)

    def _remember(self, group_id: str, marks: Sequence[str]) -> None:
        self._recent[group_id] = list(marks)
        for mark in marks:
            self._known[mark] = self._known.get(mark, 0) + 1
        while len(self._recent) > self._window:
            for mark in self._recent.pop(next(iter(self._recent))):
                self._known[mark] -= 1
                if not self._known[mark]:
                    del self._known[mark]


def _mark(task: bytes, branches: Sequence[Tokens]) -> str:
    digest = xxhash.xxh3_64(task)
    for branch in branches:
        digest.update(branch.token_ids[branch.loss_mask].astype("<i4").tobytes())
        digest.update(b"|")
    return digest.hexdigest()
