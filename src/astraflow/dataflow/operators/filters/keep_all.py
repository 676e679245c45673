"""An operator that keeps every group."""

from __future__ import annotations

from astraflow.contracts import Operator


class KeepAll(Operator):
    """Passes every group on as it is; use it where even equal groups carry a signal."""

    makes = ("the choice of equal groups",)
