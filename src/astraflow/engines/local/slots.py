"""Keys and values of the running rows: row `i` lives in slot `i`, slots 0..n-1 are in use, so decoding reads views.

Every row starts at position 0 of its slot, whatever its length; what lies beyond a row's length is stale and masked.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from astraflow.engines.local.shelf import Prefix

_ROUND = 32  # positions are reserved in multiples of this


class SlotCache(Cache):
    """A transformers cache of ragged rows, `[layers, slots, heads, positions, width]`, grown on demand.

    Before each forward pass the caller says what it writes: `expect_prompts` or `expect_tokens`.
    """

    def __init__(self, num_layers: int, max_slots: int, max_positions: int) -> None:
        super().__init__(layers=[])
        self._num_layers = num_layers
        self._max = (max_slots, max_positions)
        self._size = (0, 0)  # slots, positions reserved
        self._keys = self._values = torch.empty(0)
        self._slots = torch.empty(0, dtype=torch.long)
        self._at: torch.Tensor | None = None  # None: whole prompts are written
        self._source: torch.Tensor | None = None  # row of the batch for each slot; None: the same
        self._seen = (slice(0), slice(0))  # slots and positions that a pass over tokens reads

    def reserve(self, slots: int, positions: int) -> None:
        """Make room; what is stored stays. Grows by half more than needed, up to the limits given."""
        old_slots, old_positions = self._size
        if slots <= old_slots and positions <= old_positions:
            return
        if slots > old_slots:
            slots = max(slots, min(old_slots * 3 // 2, self._max[0]))
        if positions > old_positions:
            rounded = -(-max(positions, old_positions * 3 // 2) // _ROUND) * _ROUND
            positions = max(positions, min(rounded, self._max[1]))
        self._size = (max(slots, old_slots), max(positions, old_positions))
        if self._keys.numel():
            for name in ("_keys", "_values"):
                old = self.__dict__[name]
                new = self._empty(old[0])
                new[:, :old_slots, :, :old_positions] = old
                self.__dict__[name] = new

    def expect_prompts(self, slots: torch.Tensor, source: torch.Tensor | None) -> None:
        """The next pass writes whole prompts from position 0: batch row `source[i]` (or `i`) into `slots[i]`."""
        self._slots, self._source, self._at = slots, source, None

    def expect_tokens(self, first: int, at: torch.Tensor, width: int) -> None:
        """The next pass writes tokens of slots `first`, `first + 1`, ... at positions `at` ([n, tokens]) and reads
        positions below `width`."""
        rows = at.shape[0]
        self._slots, self._at = torch.arange(first, first + rows)[:, None], at
        self._seen = (slice(first, first + rows), slice(width))

    def move(self, source: torch.Tensor, target: torch.Tensor, positions: int) -> None:
        """Copy slots `source` over slots `target`."""
        for buffer in (self._keys, self._values):
            buffer[:, target, :, :positions] = buffer[:, source, :, :positions]

    def copy_out(self, slot: int, tokens: int) -> Prefix:
        """The first `tokens` positions of a slot."""
        return Prefix(tokens, self._keys[:, slot, :, :tokens].clone(), self._values[:, slot, :, :tokens].clone())

    def copy_in(self, slot: int, prefix: Prefix) -> None:
        """Inverse of `copy_out`."""
        self._keys[:, slot, :, : prefix.tokens] = prefix.keys
        self._values[:, slot, :, : prefix.tokens] = prefix.values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer: store what is new, return what it attends to."""
        if not self._keys.numel():
            self._keys, self._values = self._empty(key_states), self._empty(value_states)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
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

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros: a masked position is still multiplied by its weight 0, so it must be finite.
        _, heads, _, width = like.shape
        return torch.zeros(self._num_layers, self._size[0], heads, self._size[1], width, dtype=like.dtype)
