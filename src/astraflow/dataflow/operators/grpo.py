"""Group-relative advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.errors import DataflowError
from astraflow.types import Group


class Grpo:
    """Credit each episode relative to its siblings: `A_i = (r_i - mean r) / (std r + eps)`, without `/ std` when not
    `normalize`.

    The baseline counts each episode once, however many branches it has; all branches share its advantage. Unscored
    episodes take no part. A group of equal rewards, or of one scored episode, gives exactly 0.
    Source: GRPO, arXiv:2402.03300 section 4.1.2; without the division: Dr. GRPO, arXiv:2503.20783.
    """

    def __init__(self, *, eps: float = 1e-6, normalize: bool = True) -> None:
        if not eps >= 0:
            raise DataflowError("grpo.eps", eps, "must be >= 0", "use 1e-6")
        self._eps, self._normalize = eps, normalize

    def on_group(self, group: Group) -> Group | str:
        group.advantages = group_advantages(group.rewards, eps=self._eps, normalize=self._normalize)
        return group

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""


def group_advantages(rewards: Sequence[float | None], *, eps: float = 1e-6, normalize: bool = True) -> list[float]:
    """[G] advantage per sibling; 0 for unscored ones (None or not finite). Example: [1, 0, None] -> [1, -1, 0]."""
    scored = [r for r in rewards if r is not None and math.isfinite(r)]
    if not scored or min(scored) == max(scored):
        return [0.0] * len(rewards)
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in scored) / len(scored))
    scale = 1.0 / (std + eps) if normalize else 1.0
    return [(r - mean) * scale if r is not None and math.isfinite(r) else 0.0 for r in rewards]
