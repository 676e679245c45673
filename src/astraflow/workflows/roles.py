"""What workflows of several policies are made from: roles that a run file gives to policies, and checked options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from astraflow.errors import Problem

Number = TypeVar("Number", int, float)


class ByRoles:
    """A workflow that says which policies it calls, so that a run file is checked against it.

    `roles`: setting -> policy; empty: it plays with the only one. `fields`: those of a task that its prompts name.
    """

    def __init__(self, roles: Mapping[str, str], fields: Sequence[str] = ()) -> None:
        self.roles, self.fields = dict(roles), tuple(fields)

    def check(self, policies: Sequence[str], workflow: str) -> None:
        """Raises: Problem: a role of a policy that the run does not have, or a policy without a role."""
        if not self.roles and len(policies) > 1:
            known = ", ".join(sorted(policies))
            raise Problem("workflow.policy", None, "must be given when a run has several policies", f"one of: {known}")
        for role, policy in self.roles.items():
            check_policy(policy, policies, f"workflow.{role}")
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


def choice(setting: str, value: str, known: Sequence[str]) -> str:
    """`value`. Raises: Problem: it is none of `known`."""
    if value not in known:
        raise Problem(f"workflow.{setting}", value, "is not known", f"use one of: {', '.join(known)}")
    return value
