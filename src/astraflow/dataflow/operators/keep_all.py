"""An operator that keeps every group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.types import Group


class KeepAll:
    """Passes every group on as it is; use it where even equal groups carry a signal."""

    def on_group(self, group: Group) -> Group | str:
        return group

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""
