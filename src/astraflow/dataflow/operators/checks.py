"""What an operator of a policy may do to a group, checked after each hook: its fault is named, never trained."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from astraflow.contracts import Operator
from astraflow.dataflow.operators.blame import MEND
from astraflow.errors import DataflowError
from astraflow.types import Group

Fixed = dict[str, Any]
"""Parts of a group by name, as they were before a hook."""
_ON_GROUP = "must stay as it is: on_group may change rewards, advantages, call_advantages and weight only"
_ON_BATCH = "must stay as it is: on_batch may change advantages, call_advantages and weight only"
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
_LARGEST = float(np.finfo(np.float32).max)


def check_result(operator: Operator, name: str, before: Fixed, result: object) -> Group | str:
    """The result of `on_group`. `before`: of the group that it was given, which it may have changed.

    Raises: DataflowError: naming operator, group and rule. Anything else where the operator left another type behind.
    """
    group_id = before["group_id"]
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
    _check_fixed(where, before, result, _ON_GROUP, MEND)
    size = len(result.episode_ids)
    for field, values in (("rewards", result.rewards), ("rewards_per_call", result.rewards_per_call)):
        if len(values) != size:
            raise DataflowError(where, len(values), f"{field} must be {size}, one per episode", MEND)
    result.rewards = [None if r is None else _number(where, "rewards", r) for r in result.rewards]
    result.rewards_per_call = [
        tuple(_number(where, "rewards_per_call", r) for r in calls) for calls in result.rewards_per_call
    ]
    if operator.phase in ("filter", "shape") and (result.advantages is not None or result.call_advantages is not None):
        raise DataflowError(
            where, "advantages", f"must not be set in phase {operator.phase}",
            "make it an operator of phase credit and name it as algorithm.advantage",
        )  # fmt: skip
    check_credit(where, result, needed=operator.phase in ("credit", "weight"))
    return result


def check_batch(where: str, before: Fixed, group: Group) -> None:
    """What `on_batch` left of one group. Raises: as `check_result`."""
    _check_fixed(where, before, group, _ON_BATCH, "change rewards in on_group")
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


def fixed_parts(group: Group, *, rewards: bool = False) -> Fixed:
    """What an operator must leave alone, copied; with `rewards` also those."""
    fixed: Fixed = {"group_id": group.group_id, "policy": group.policy, "task": group.task}
    lists: dict[str, Iterable[Any]] = {
        "episode_ids": group.episode_ids,
        "num_calls": group.num_calls,
        "metrics": group.metrics,
        "num_tokens": group.num_tokens,
        "num_truncated": group.num_truncated,
        "min_version": group.min_version,
        "errors": group.errors,
    }
    if rewards:
        lists |= {"rewards": group.rewards, "rewards_per_call": group.rewards_per_call}
    return fixed | {name: list(values) for name, values in lists.items()}


def _check_fixed(where: str, before: Fixed, group: Group, rule: str, fix: str) -> None:
    after = fixed_parts(group, rewards="rewards" in before)
    if after == before:
        return
    name = next(name for name, value in before.items() if after[name] != value)
    if name == "episode_ids" and "rewards" not in before:
        raise DataflowError(
            where, group.episode_ids, f"must keep its episodes {before[name]}, each once and in order",
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
