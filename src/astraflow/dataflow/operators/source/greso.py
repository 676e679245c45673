"""Skips tasks whose recent groups had equal rewards, before anything is spent on them (GRESO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require
from astraflow.dataflow.operators.source.outcomes import equal_reward
from astraflow.types import Group, SourceView, Task

_LEAST, _MOST = 0.01, 0.99


class Greso(Operator):
    """Rolls a task out with probability `P = max(p_kind^z, floor_kind)`: z counts its latest groups in a row whose
    rewards were all equal, kind is "easy" when the reward of the last of them was above `easy_above`, else "hard". A
    task with z = 0, or never played, is always rolled out.

    The base probabilities adapt. Once per weight version, with n groups seen since the last time, of which n_kind had
    equal rewards of that kind: `p_kind <- p_kind - delta` if `n_kind / n >= target_kind`, else `p_kind + delta`, kept
    in [0.01, 0.99]. They stand still during the first `warmup_epochs` epochs, when no task has a history yet.
    With several policies a task has a z for each, and the largest P decides.
    State: z and kind per row that was played, and six numbers.
    Source: GRESO, arXiv:2506.02177 section 4 (there without floors: set both to 0).
    """

    place = "source"
    min_siblings = 2

    def __init__(
        self,
        *,
        p_easy: float = 0.5,
        p_hard: float = 0.5,
        target_easy: float = 1 / 12,
        target_hard: float = 1 / 6,
        delta: float = 0.01,
        floor_easy: float = 0.1,
        floor_hard: float = 0.4,
        easy_above: float = 0.5,
        warmup_epochs: int = 1,
    ) -> None:
        for name, value in (("p_easy", p_easy), ("p_hard", p_hard)):
            require(_LEAST <= value <= _MOST, f"greso.{name}", value, f"must be from {_LEAST} to {_MOST}", "use 0.5")
        for name, value in (
            ("target_easy", target_easy), ("target_hard", target_hard), ("delta", delta), ("floor_easy", floor_easy),
            ("floor_hard", floor_hard),
        ):  # fmt: skip
            require(0 <= value <= 1, f"greso.{name}", value, "must be from 0 to 1", "leave it out for the default")
        require(warmup_epochs >= 0, "greso.warmup_epochs", warmup_epochs, "must be >= 0", "use 1")
        self._p = {"easy": p_easy, "hard": p_hard}
        self._target = {"easy": target_easy, "hard": target_hard}
        self._floor = {"easy": floor_easy, "hard": floor_hard}
        self._delta, self._easy_above, self._warmup_epochs = delta, easy_above, warmup_epochs
        self._step = self._num_groups = 0
        self._equal = {"easy": 0, "hard": 0}  # of `_num_groups`
        self._runs: dict[str, dict[int, int]] = {}  # policy -> row -> z, negative when the kind is hard

    def admit(self, task: Task, view: SourceView) -> float:
        if view.step > self._step:
            self._adapt(task.epoch)
            self._step = view.step
        runs = [rows[task.row] for rows in self._runs.values() if task.row in rows]
        return max((self._probability(run) for run in runs), default=1.0)

    def on_result(self, group: Group) -> None:
        seen = equal_reward(group)
        if seen is None:
            return
        equal, reward = seen
        rows = self._runs.setdefault(group.policy, {})
        self._num_groups += 1
        z = abs(rows.get(group.task.row, 0)) + 1
        if not equal:
            rows[group.task.row] = 0
        elif reward > self._easy_above:
            self._equal["easy"] += 1
            rows[group.task.row] = z
        else:
            self._equal["hard"] += 1
            rows[group.task.row] = -z

    def state_dict(self) -> dict[str, Any]:
        return {
            "p": self._p,
            "step": self._step,
            "num_groups": self._num_groups,
            "equal": self._equal,
            "runs": {policy: {"rows": list(rows), "z": list(rows.values())} for policy, rows in self._runs.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._p, self._equal = dict(state["p"]), dict(state["equal"])
        self._step, self._num_groups = state["step"], state["num_groups"]
        self._runs = {policy: dict(zip(x["rows"], x["z"], strict=True)) for policy, x in state["runs"].items()}

    def _probability(self, run: int) -> float:
        if run == 0:
            return 1.0
        kind = "easy" if run > 0 else "hard"
        return max(float(self._p[kind] ** abs(run)), self._floor[kind])

    def _adapt(self, epoch: int) -> None:
        if not self._num_groups:
            return
        if epoch >= self._warmup_epochs:
            for kind, count in self._equal.items():
                move = -self._delta if count / self._num_groups >= self._target[kind] else self._delta
                self._p[kind] = min(max(self._p[kind] + move, _LEAST), _MOST)
        self._num_groups, self._equal = 0, {"easy": 0, "hard": 0}
