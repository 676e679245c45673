"""Keys and values of the rows: row `i` lives in slot `i`, slots 0..n-1 are in use, so attention reads views.

Every row starts at position 0 of its slot, whatever its length; what lies beyond a row's length is stale and masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache

from astraflow.engines.local.caches.shelf import Prefix

_ROUND = 32  # positions are reserved in multiples of this


class SlotCache(Cache):
    """A transformers cache of ragged rows, per layer `[slots, heads, positions, width]`, grown on demand.

    Before each forward pass the caller says by `expect` where its tokens belong.
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
        self._slots = self._at = torch.empty(0, dtype=torch.long)  # of the tokens of the pass

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

    def expect(self, slots: torch.Tensor, at: torch.Tensor) -> None:
        """The next pass writes its tokens into these slots at these positions, both [tokens]."""
        self._slots, self._at = slots, at

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

    def repeat(self, slot: int, others: Sequence[int], start: int, stop: int) -> None:
        """Copy these positions of a slot into others."""
        for buffer in (*self._keys, *self._values):
            if buffer is not None:
                buffer[others, :, start:stop] = buffer[slot, :, start:stop].clone()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer with what is new, `[1, heads, tokens, width]`, perhaps more than was expected;
        gives all slots."""
        keys = self._buffer(self._keys, layer_idx, key_states)
        values = self._buffer(self._values, layer_idx, value_states)
        count = len(self._at)
        keys[self._slots, :, self._at] = key_states[0, :, :count].transpose(0, 1)
        values[self._slots, :, self._at] = value_states[0, :, :count].transpose(0, 1)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Prompts start at position 0."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Of a mask that nobody reads."""
        return query_length, 0

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
