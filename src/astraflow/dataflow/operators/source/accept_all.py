"""An operator of a source that lets every task through."""

from __future__ import annotations

from astraflow.contracts import Operator


class AcceptAll(Operator):
    """Lets every task through: what a source without operators does, by name."""

    place = "source"
