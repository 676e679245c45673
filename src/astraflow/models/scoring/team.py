"""How the tokens of a pack are divided among those that compute it together."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class HeadExchange(Protocol):
    """Attention needs all tokens, but each head on its own: tokens are swapped for heads before it, and back after."""

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[1, all heads, own tokens, D] -> [1, own heads, all tokens, D]."""

    def to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """[1, all tokens, own heads, D] -> [1, own tokens, all heads, D]."""


class Team:
    """One that is alone: it has all tokens."""

    size = 1
    exchange: HeadExchange | None = None

    def tokens(self, values: np.ndarray) -> np.ndarray:
        """Of [U] per token, U a multiple of `size`: what this member embeds, [U / size]."""
        return values

    def positions(self, values: np.ndarray) -> np.ndarray:
        """Of [U] per token: what this member's attention layers make queries, keys and values of."""
        return values

    def picked(self, hidden: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        """The last states of its tokens [U / size, H] of all members -> those at its share of `index` [N]: [n, H]."""
        return hidden.index_select(0, torch.from_numpy(index).to(hidden.device))

    def share(self, values: np.ndarray) -> np.ndarray:
        """Of [N] per trained token: [n] of this member."""
        return values

    def together(self, column: torch.Tensor, count: int) -> torch.Tensor:
        """The columns [n] of all members: [count], for all. Each makes the same loss of it, whose gradient is its own
        share of that."""
        return column


ALONE = Team()
