"""Bounds how many tasks of a source are under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require
from astraflow.types import SourceView, Task


class Throttle(Operator):
    """Lets the source wait while `in_flight` of its groups are under way, or `per_step` were admitted since the last
    weight version of the slowest policy; nothing is skipped, and other sources of the mix take its turns. 0: no bound.

    State: the step, and how many groups of the source had been admitted when it began.
    """

    place = "source"

    def __init__(self, *, in_flight: int = 0, per_step: int = 0) -> None:
        require(in_flight >= 0, "throttle.in_flight", in_flight, "must be >= 0", "use 0 for no bound")
        require(per_step >= 0, "throttle.per_step", per_step, "must be >= 0", "use 0 for no bound")
        require(in_flight + per_step > 0, "throttle", "{}", "bounds nothing", "give in_flight, per_step, or both")
        self._in_flight, self._per_step = in_flight, per_step
        self._step, self._before = 0, 0

    def admit(self, task: Task, view: SourceView) -> float | Literal["wait"]:
        if view.step > self._step:
            self._step, self._before = view.step, view.admitted
        if self._in_flight and view.in_flight >= self._in_flight:
            return "wait"
        if self._per_step and view.admitted - self._before >= self._per_step:
            return "wait"
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._before = state["step"], state["before"]
