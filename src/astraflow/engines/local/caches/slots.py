"""Keys and values of the running rows: row `i` lives in slot `i`, slots 0..n-1 are in use, so decoding reads views.

Every row starts at position 0 of its slot, whatever its length; what lies beyond a row's length is stale and masked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Cache

from astraflow.engines.local.caches.shelf import Prefix

_ROUND = 32  # positions are reserved in multiples of this


class SlotCache(Cache):
    """A transformers cache of ragged rows, per layer `[slots, heads, positions, width]`, grown on demand.

    Before each forward pass the caller says what it writes: `expect_prompts` or `expect_tokens`.
    """

    def __init__(
        self, num_layers: int, max_slots: int, max_positions: int, position_bytes: int = 0, max_bytes: int = 0
    ) -> None:
        """`position_bytes`: of keys and values of one position of one slot, all layers; `max_bytes` 0: no limit."""
        super().__init__(layers=[])
        self._max = (max_slots, max_positions)
        self._position_bytes, self.max_bytes = position_bytes, max_bytes
        self._size = (0, 0)  # slots, positions reserved
        self._keys: list[torch.Tensor | None] = [None] * num_layers  # None: before the first pass
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._slots = torch.empty(0, dtype=torch.long)
        self._at: torch.Tensor | None = None  # None: whole prompts are written
        self._source: torch.Tensor | None = None  # row of the batch for each slot; None: the same
        self._seen = (slice(0), slice(0))  # slots and positions that a pass over tokens reads

    def alike(self, slots: int) -> SlotCache:
        """An empty one of so many slots for the same model."""
        return SlotCache(len(self._keys), slots, self._max[1], self._position_bytes)

    @property
    def num_bytes(self) -> int:
        """Memory that it has now."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values) if buffer is not None)

    def needed(self, slots: int, positions: int) -> int:
        """Bytes of so many slots with room for so many positions each."""
        return slots * min(_rounded(positions), self._max[1]) * self._position_bytes

    def reserve(self, slots: int, positions: int) -> None:
        """Make room; what is stored stays. Grows by half more than needed, up to the limits given.

        At the limit of bytes, what is reserved for rows that are gone gives way: then at most `slots` slots and
        `positions` positions hold anything that is still read.
        """
        old_slots, old_positions = self._size
        if slots <= old_slots and positions <= old_positions:
            return
        wider = slots if slots <= old_slots else max(slots, min(old_slots * 3 // 2, self._max[0]))
        longer = positions if positions <= old_positions else max(positions, old_positions * 3 // 2)
        size = (max(wider, old_slots), max(min(_rounded(longer), self._max[1]), positions, old_positions))
        if self.max_bytes and self.needed(*size) > self.max_bytes:
            most = self.max_bytes // (slots * self._position_bytes) // _ROUND * _ROUND
            size = (slots, max(positions, min(_rounded(longer), most, self._max[1])))
        self._size = size
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):  # one after the other: never twice the memory
                if old is not None:
                    buffers[layer] = new = self._empty(old)
                    kept = (min(old_slots, size[0]), min(old_positions, size[1]))
                    new[: kept[0], :, : kept[1]] = old[: kept[0], :, : kept[1]]

    def expect_prompts(self, slots: torch.Tensor, source: torch.Tensor | None) -> None:
        """The next pass writes whole prompts from position 0: batch row `source[i]` (or `i`) into `slots[i]`."""
        self._slots, self._source, self._at = slots, source, None

    def expect_tokens(self, first: int, at: torch.Tensor, width: int) -> None:
        """The next pass writes tokens of slots `first`, `first + 1`, ... at positions `at` ([n, tokens]) and reads
        positions below `width`."""
        rows = at.shape[0]
        self._slots, self._at = torch.arange(first, first + rows, device=at.device)[:, None], at
        self._seen = (slice(first, first + rows), slice(width))

    def move(self, source: np.ndarray, target: np.ndarray, positions: int) -> None:
        """Copy slots `source` over slots `target`."""
        for buffer in (*self._keys, *self._values):
            if buffer is not None:
                into, of = (torch.from_numpy(slots).to(buffer.device) for slots in (target, source))
                buffer[into, :, :positions] = buffer[of, :, :positions]

    def view(self, slot: int, tokens: int) -> Prefix:
        """The first `tokens` positions of a slot, as they lie here."""
        keys = [buffer[slot, :, :tokens] for buffer in self._keys if buffer is not None]
        return Prefix(tokens, keys, [buffer[slot, :, :tokens] for buffer in self._values if buffer is not None])

    def copy_in(self, slot: int, prefix: Prefix) -> None:
        """Store `prefix` in a slot that has room for it."""
        for buffers, states in ((self._keys, prefix.keys), (self._values, prefix.values)):
            for layer, state in enumerate(states):
                self._buffer(buffers, layer, state[None])[slot, :, : prefix.tokens] = state

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer: store what is new, return what it attends to."""
        keys = self._buffer(self._keys, layer_idx, key_states)
        values = self._buffer(self._values, layer_idx, value_states)
        if self._at is None:
            length = key_states.shape[2]
            new = (key_states, value_states)
            if self._source is not None:
                new = (key_states[self._source], value_states[self._source])
            keys[self._slots, :, :length], values[self._slots, :, :length] = new
            return key_states, value_states
        keys[self._slots, :, self._at] = key_states.transpose(1, 2)
        values[self._slots, :, self._at] = value_states.transpose(1, 2)
        slots, positions = self._seen
        return keys[slots, :, positions], values[slots, :, positions]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Prompts start at position 0."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of what a pass without an explicit mask attends to."""
        return (query_length if self._at is None else self._seen[1].stop), 0

    def _buffer(self, buffers: list[torch.Tensor | None], layer: int, like: torch.Tensor) -> torch.Tensor:
        found = buffers[layer]
        if found is None:
            buffers[layer] = found = self._empty(like)
        return found

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros: a masked position is still multiplied by its weight 0, so it must be finite.
        _, heads, _, width = like.shape
        return torch.zeros(self._size[0], heads, self._size[1], width, dtype=like.dtype, device=like.device)


def _rounded(positions: int) -> int:
    return -(-positions // _ROUND) * _ROUND
