"""Keys and values of prefixes that may come back: a group's prompt for its next sibling, a turn for the one after it.

The key of a prefix is the weights that computed it and its ids: what one version computed is never served under
another. A swap drops what the version before has left, since no later request can ask for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Key = tuple[Hashable, bytes]  # weights, ids


@dataclass(slots=True, eq=False)
class Prefix:
    """Keys and values of `tokens` leading ids, per layer `[heads, tokens, width]`."""

    tokens: int
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Memory of both."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def copy(self) -> Prefix:
        """In memory of its own."""
        return Prefix(self.tokens, [tensor.clone() for tensor in self.keys], [tensor.clone() for tensor in self.values])


class Shelf:
    """Least recently used first out, bounded in bytes. Weights and id list are the key, so a hit is never a guess."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._stored: OrderedDict[Key, Prefix] = OrderedDict()
        self._lengths: Counter[int] = Counter()  # of the stored prefixes, in tokens

    def holds(self, weights: Hashable, ids: np.ndarray) -> bool:
        """Whether exactly these ids are stored, as `weights` computed them."""
        return (weights, ids.tobytes()) in self._stored

    def find(self, weights: Hashable, ids: np.ndarray) -> Prefix | None:
        """The longest prefix of `ids` ([n] int32) that `weights` computed and that leaves at least the last id to be
        read."""
        for length in sorted((n for n in self._lengths if n < ids.size), reverse=True):
            key = (weights, ids[:length].tobytes())
            found = self._stored.get(key)
            if found is not None:
                self._stored.move_to_end(key)
                return found
        return None

    def put(self, weights: Hashable, ids: np.ndarray, prefix: Prefix) -> None:
        """Keep a copy of `prefix` of all of `ids`, computed by `weights`; the longest unused go when there is no
        room."""
        key = (weights, ids.tobytes())
        if key in self._stored:
            self._stored.move_to_end(key)
            return
        if prefix.num_bytes > self._max_bytes:
            return
        self._stored[key] = prefix.copy()
        self._lengths[prefix.tokens] += 1
        self._bytes += prefix.num_bytes
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def drop(self, weights: Hashable) -> None:
        """Forget all that `weights` computed."""
        for key in [key for key in self._stored if key[0] == weights]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        dropped = self._stored.pop(key)
        self._bytes -= dropped.num_bytes
        self._lengths[dropped.tokens] -= 1
        if not self._lengths[dropped.tokens]:
            del self._lengths[dropped.tokens]
