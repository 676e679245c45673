"""The operators of one policy in the order of the run file, then its advantages."""

from __future__ import annotations

import math
from typing import Any

from astraflow.config import rooms
from astraflow.config.schema import PolicySection
from astraflow.contracts import Operator
from astraflow.errors import DataflowError
from astraflow.types import Group


class Chain:
    """Runs complete groups through operators; a user operator that breaks its contract is an error, not a drop."""

    def __init__(self, where: str, operators: list[Operator], advantage: Operator) -> None:
        self._where, self._operators, self._advantage = where, operators, advantage

    def on_group(self, group: Group) -> Group | str:
        """The group with advantages, or the reason for which it is dropped.

        Raises: DataflowError: an operator failed or gave something that its contract does not allow.
        """
        known = set(group.episode_ids)
        for operator in self._operators:
            result = self._run(operator, group)
            if isinstance(result, str):
                return result or "dropped"
            group = result
        if group.advantages is None:
            result = self._run(self._advantage, group)
            if isinstance(result, str):
                return result or "dropped"
            group = result
        self._check(group, known)
        return group

    def state_dicts(self) -> list[dict[str, Any]]:
        """States of all operators, the advantage operator last."""
        return [o.state_dict() for o in (*self._operators, self._advantage)]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Inverse of `state_dicts`; an empty list leaves fresh operators as they are."""
        if states:
            for operator, state in zip((*self._operators, self._advantage), states, strict=True):
                operator.load_state_dict(state)

    def _run(self, operator: Operator, group: Group) -> Group | str:
        name = f"{self._where} {type(operator).__name__}"
        try:
            result = operator.on_group(group)
        except Exception as error:
            raise DataflowError(
                name, f"{type(error).__name__}: {error}", f"failed on group {group.group_id}", "mend the operator"
            ) from error
        if not isinstance(result, Group | str):
            raise DataflowError(
                name, result, "must be a Group, or the reason for dropping it as text", "mend the operator"
            )
        return result

    def _check(self, group: Group, known: set[str]) -> None:
        size, advantages = len(group.episode_ids), group.advantages
        lists = (group.rewards, advantages or ())
        if any(len(x) != size for x in lists) or not known.issuperset(group.episode_ids):
            raise DataflowError(
                f"{self._where} group {group.group_id}", [len(x) for x in lists],
                f"must keep one reward and one advantage for each of its {size} episodes", "mend the operator",
            )  # fmt: skip
        if not all(math.isfinite(a) for a in advantages or ()) or not (
            math.isfinite(group.weight) and group.weight >= 0
        ):
            raise DataflowError(
                f"{self._where} group {group.group_id}", advantages, "must have finite advantages and a weight >= 0",
                "mend the operator",
            )  # fmt: skip


def chain_of(name: str, policy: PolicySection) -> Chain:
    """The chain that the run file asks for."""
    where = f"policies.{name}"
    operators = [
        rooms.build("operators", spec.type, spec.options, f"{where}.operators.{i}")
        for i, spec in enumerate(policy.operators)
    ]
    spec = policy.algorithm.advantage
    advantage = rooms.build("advantages", spec.type, spec.options, f"{where}.algorithm.advantage")
    return Chain(where, operators, advantage)
