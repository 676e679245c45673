"""What an operator of a policy may do to a group, checked after each hook: its fault is named, never trained."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from astraflow.contracts import Operator
from astraflow.dataflow.operators.blame import MEND
from astraflow.errors import DataflowError
from astraflow.types import Group, Task

_ON_GROUP = (
    "must stay as it is: on_group may change rewards, rewards_per_call, advantages, call_advantages and weight only"
)
_ON_BATCH = "must stay as it is: on_batch may change advantages, call_advantages and weight only"
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
_LARGEST = float(np.finfo(np.float32).max)


class Fixed(NamedTuple):
    """A group before a hook, as far as hooks must leave it alone; the last two are for `on_batch` only."""

    group_id: str
    policy: str
    task: Task
    episode_ids: list[str]
    num_calls: list[int]
    metrics: list[Mapping[str, float]]
    num_tokens: list[int]
    num_truncated: list[int]
    min_version: list[int]
    errors: list[str | None]
    rewards: list[float | None]
    rewards_per_call: list[tuple[float, ...]]


def check_result(operator: Operator, name: str, before: Fixed, result: object) -> Group | str:
    """The result of `on_group`. `before`: of the group that it was given, which it may have changed.

    Raises: DataflowError: naming operator, group and rule. Anything else where the operator left another type behind.
    """
    group_id = before.group_id
    if isinstance(result, str):
        if not _REASON.fullmatch(result):
            raise DataflowError(
                name, result, f"must drop group {group_id} for a reason like 'too_short' (lower case, digits, _)",
                "return such a word; it is a counter",
            )  # fmt: skip
        return str(result)
    if not isinstance(result, Group):
        raise DataflowError(name, result, f"must give a Group, or the reason for dropping {group_id} as text", MEND)
    where = f"{name} group {group_id}"
    _check_fixed(where, before, result, rewards=False, rule=_ON_GROUP, fix=MEND)
    size = len(result.episode_ids)
    for field, values in (("rewards", result.rewards), ("rewards_per_call", result.rewards_per_call)):
        if len(values) != size:
            raise DataflowError(where, len(values), f"{field} must be {size}, one per episode", MEND)
    result.rewards = [None if r is None else _number(where, "rewards", r) for r in result.rewards]
    if result.rewards_per_call != before.rewards_per_call:
        result.rewards_per_call = [
            tuple(_number(where, "rewards_per_call", r) for r in calls) for calls in result.rewards_per_call
        ]
        for k, (calls, wanted) in enumerate(zip(result.rewards_per_call, result.num_calls, strict=True)):
            if len(calls) not in (0, wanted):
                raise DataflowError(
                    f"{where} episode {result.episode_ids[k]}", len(calls),
                    f"rewards_per_call must be {wanted}, one per call, or none", MEND,
                )  # fmt: skip
    if operator.phase in ("filter", "shape") and (result.advantages is not None or result.call_advantages is not None):
        raise DataflowError(
            where, "advantages", f"must not be set in phase {operator.phase}",
            "make it an operator of phase credit and name it as algorithm.advantage",
        )  # fmt: skip
    check_credit(where, result, needed=operator.phase in ("credit", "weight"))
    return result


def check_batch(where: str, before: Fixed, group: Group) -> None:
    """What `on_batch` left of one group. Raises: as `check_result`."""
    _check_fixed(where, before, group, rewards=True, rule=_ON_BATCH, fix="change rewards in on_group")
    check_credit(where, group, needed=True)


def check_credit(where: str, group: Group, *, needed: bool) -> None:
    """Advantages and weight are finite numbers of the right count; they become plain floats.

    Raises: DataflowError: naming what is wrong.
    """
    size = len(group.episode_ids)
    if needed and group.advantages is None and group.call_advantages is None:
        raise DataflowError(where, None, "must set advantages or call_advantages", "make one for each episode")
    if group.advantages is not None:
        if len(group.advantages) != size:
            raise DataflowError(where, len(group.advantages), f"advantages must be {size}, one per episode", MEND)
        group.advantages = [_number(where, "advantages", a) for a in group.advantages]
    if group.call_advantages is not None:
        _check_calls(where, group, size)
        group.call_advantages = [tuple(_number(where, "call_advantages", a) for a in x) for x in group.call_advantages]
    group.weight = _number(where, "weight", group.weight)
    if group.weight < 0:
        raise DataflowError(where, group.weight, "weight must be >= 0", "use 0 to leave the group out of the loss")


def fixed_parts(group: Group) -> Fixed:
    """Of a good group."""
    return Fixed(
        group.group_id, group.policy, group.task, list(group.episode_ids), list(group.num_calls), list(group.metrics),
        list(group.num_tokens), list(group.num_truncated), list(group.min_version), list(group.errors),
        list(group.rewards), list(group.rewards_per_call),
    )  # fmt: skip


def _check_fixed(where: str, before: Fixed, group: Group, *, rewards: bool, rule: str, fix: str) -> None:
    """Also `rewards` and those of calls are as before."""
    after = (
        group.group_id, group.policy, group.task, group.episode_ids, group.num_calls, group.metrics, group.num_tokens,
        group.num_truncated, group.min_version, group.errors, group.rewards, group.rewards_per_call,
    )  # fmt: skip
    num = len(after) if rewards else len(after) - 2
    if after[:num] == before[:num]:
        return
    name = next(name for name, old, new in zip(Fixed._fields, before, after, strict=True) if old != new)
    if name == "episode_ids" and not rewards:
        raise DataflowError(
            where, group.episode_ids, f"must keep its episodes {before.episode_ids}, each once and in order",
            "set the reward of an episode to None to leave it out",
        )  # fmt: skip
    raise DataflowError(where, name, rule, fix)


def _check_calls(where: str, group: Group, size: int) -> None:
    calls = group.call_advantages or []
    if len(calls) != size:
        raise DataflowError(where, len(calls), f"call_advantages must be {size} tuples, one per episode", MEND)
    for k, wanted in enumerate(group.num_calls):
        if group.rewards[k] is not None and len(calls[k]) != wanted:
            raise DataflowError(
                f"{where} episode {group.episode_ids[k]}", len(calls[k]),
                f"call_advantages must be {wanted}, one per call", "make as many as Group.num_calls says",
            )  # fmt: skip


def _number(where: str, field: str, value: Any) -> float:
    """A plain float: a numpy scalar would not be JSON. It fits into float32, as which it is served."""
    if type(value) is float and -_LARGEST <= value <= _LARGEST:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not -_LARGEST <= number <= _LARGEST:
        raise DataflowError(where, value, f"{field} must be finite numbers (float32)", MEND)
    return number
