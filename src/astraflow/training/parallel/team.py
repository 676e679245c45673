"""Ranks that compute a pack together: its tokens divided among them, its attention by heads.

```
 member (c, t) of context x tensor     embeddings, norms, head: its own tokens, 1 / (context * tensor)
   attention and MLP layers            gathered over t: tokens of c, with 1 / tensor of the weights (`tensor`)
   scores of attention                 exchanged over c: all tokens, with 1 / (context * tensor) of the heads
```
Each member then has the scores of all trained tokens and makes the same loss of them. What it adds to a gradient is
its own tokens' part, so parts are summed over all ranks, whether they work on the same pack or on others.
Source: heads for tokens is Ulysses (arXiv:2309.14509), layers between divided tokens is arXiv:2205.05198 section 4.2.2.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from astraflow.models.scoring.team import Team


class TeamOfRanks(Team):
    """This rank in its team."""

    def __init__(self, team: DeviceMesh, context: DeviceMesh) -> None:
        """`team`: all members. `context`: those among which attention is divided by heads."""
        self._mesh, self._context = team, context
        self.size, self._place = team.size(), team.get_local_rank()
        self.exchange = Ulysses(context) if context.size() > 1 else None

    def tokens(self, values: np.ndarray) -> np.ndarray:
        """See `Team`."""
        return np.split(values, self.size)[self._place]

    def positions(self, values: np.ndarray) -> np.ndarray:
        """See `Team`. Those of all that share this context."""
        return np.split(values, self._context.size())[self._context.get_local_rank()]

    def picked(self, hidden: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        """See `Team`."""
        there = DTensor.from_local(hidden, self._mesh, [Shard(0)], run_check=False)
        whole = there.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return super().picked(whole, self.share(index))

    def share(self, values: np.ndarray) -> np.ndarray:
        """See `Team`. All have as many: the last ones repeat what comes last."""
        width = -(-len(values) // self.size)
        return values[np.minimum(self._place * width + np.arange(width), len(values) - 1)]

    def together(self, column: torch.Tensor, count: int) -> torch.Tensor:
        """See `Team`."""
        there = DTensor.from_local(column, self._mesh, [Shard(0)], run_check=False)
        return there.redistribute(placements=[Replicate()]).to_local()[:count].clone()  # FSDP warns of views


class Ulysses:
    """See `HeadExchange`: over the ranks of `mesh`, which have one run of tokens each."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `HeadExchange`. Key-value heads of which there are fewer than ranks go to several."""
        copies = max(1, self._mesh.size() // key.shape[1])
        key, value = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))
        return self._swapped(query), self._swapped(key), self._swapped(value)

    def to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """See `HeadExchange`."""
        return self._swapped(output)

    def _swapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Divided along dimension 2 -> divided along dimension 1."""
        there = DTensor.from_local(tensor, self._mesh, [Shard(2)], run_check=False)
        return there.redistribute(placements=[Shard(1)]).to_local()
