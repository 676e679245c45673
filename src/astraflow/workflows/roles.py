"""What workflows of several policies are made from: roles that a run file gives to policies, and checked options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from astraflow.errors import Problem

Number = TypeVar("Number", int, float)


class ByRoles:
    """A workflow that says which policies it calls, so that a run file is checked against it.

    `roles`: setting -> policy; empty: it plays with the only one. `fields`: those of a task that its prompts name.
    `apart`: credit is by policy, so none may have two roles.
    """

    def __init__(self, roles: Mapping[str, str], fields: Sequence[str] = (), *, apart: bool = False) -> None:
        self.roles, self.fields, self._apart = dict(roles), tuple(fields), apart

    def check(self, policies: Sequence[str], workflow: str) -> None:
        """Raises: Problem: a role of a policy that the run does not have, a policy without a role, or with two."""
        if not self.roles and len(policies) > 1:
            known = ", ".join(sorted(policies))
            raise Problem("workflow.policy", None, "must be given when a run has several policies", f"one of: {known}")
        first: dict[str, str] = {}
        for role, policy in self.roles.items():
            check_policy(policy, policies, f"workflow.{role}")
            if self._apart and (other := first.setdefault(policy, role)) != role:
                raise Problem(
                    f"workflow.{role}", policy, f"is workflow.{other} already, and would get one reward for both",
                    "name another policy, which may have the same model",
                )  # fmt: skip
        for policy in policies:
            if self.roles and policy not in self.roles.values():
                raise Problem(
                    "workflow.type", workflow, f"never calls policies.{policy}",
                    f"take that out, or give it a role: workflow.{', workflow.'.join(self.roles)}",
                )  # fmt: skip


def check_policy(policy: str, policies: Sequence[str], where: str) -> None:
    """Raises: Problem: a workflow that names a policy which the run does not have."""
    if policy not in policies:
        known = ", ".join(sorted(policies))
        raise Problem(where, policy, "is not a policy of this run", f"name one of: {known}")


def at_least(setting: str, value: Number, least: int, fix: str) -> Number:
    """`value`. Raises: Problem: it is below `least`."""
    if value < least:
        raise Problem(f"workflow.{setting}", value, f"must be >= {least}", fix)
    return value


def some_text(setting: str, value: str, fix: str) -> str:
    """`value` in lower case, as what replies begin with. Raises: Problem: it is empty, as which every reply begins."""
    if not value:
        raise Problem(f"workflow.{setting}", "''", "must not be empty, as every reply begins with that", fix)
    return value.casefold()


def choice(setting: str, value: str, known: Sequence[str]) -> str:
    """`value`. Raises: Problem: it is none of `known`."""
    if value not in known:
        raise Problem(f"workflow.{setting}", value, "is not known", f"use one of: {', '.join(known)}")
    return value
