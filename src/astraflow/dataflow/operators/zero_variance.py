"""An operator that drops groups without a signal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.types import Group


class ZeroVariance:
    """Drops a group whose scored episodes all have the same reward: every group-relative advantage would be 0."""

    def on_group(self, group: Group) -> Group | str:
        scored = {reward for reward in group.rewards if reward is not None}
        return group if len(scored) > 1 else "zero_variance"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""
