"""What an operator of a policy may do to a group, checked after each hook: its fault is named, never trained."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from astraflow.contracts import Operator
from astraflow.errors import DataflowError
from astraflow.types import Group

_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MEND = "mend the operator"
_LARGEST = float(np.finfo(np.float32).max)


def check_result(
    operator: Operator, name: str, given: Group, episode_ids: Sequence[str], result: object
) -> Group | str:
    """The result of `on_group`. `given`: what it got (perhaps changed by now), `episode_ids`: as they were before.

    Raises: DataflowError: naming operator, group and rule.
    """
    if isinstance(result, str):
        if not _REASON.fullmatch(result):
            raise DataflowError(
                name, result, f"must drop group {given.group_id} for a reason like 'too_short' (lower case, digits, _)",
                "return such a word; it is a counter",
            )  # fmt: skip
        return result
    if not isinstance(result, Group):
        raise DataflowError(
            name, result, f"must give a Group, or the reason for dropping {given.group_id} as text", _MEND
        )
    where = f"{name} group {given.group_id}"
    if (result.group_id, result.policy) != (given.group_id, given.policy):
        raise DataflowError(where, f"{result.policy} {result.group_id}", "must give back the group that it got", _MEND)
    if list(result.episode_ids) != list(episode_ids):
        raise DataflowError(
            where, result.episode_ids, f"must keep its episodes {list(episode_ids)}, each once and in order",
            "set the reward of an episode to None to leave it out",
        )  # fmt: skip
    _check_lengths(where, result)
    result.rewards = [None if r is None else _number(where, "rewards", r) for r in result.rewards]
    if operator.phase in ("filter", "shape") and (result.advantages is not None or result.call_advantages is not None):
        raise DataflowError(
            where, "advantages", f"must not be set in phase {operator.phase}",
            "make it an operator of phase credit and name it as algorithm.advantage",
        )  # fmt: skip
    check_credit(where, result, needed=operator.phase in ("credit", "weight"))
    return result


def check_credit(where: str, group: Group, *, needed: bool) -> None:
    """Advantages and weight are finite numbers of the right count; they become plain floats.

    Raises: DataflowError: naming what is wrong.
    """
    size = len(group.episode_ids)
    if needed and group.advantages is None and group.call_advantages is None:
        raise DataflowError(where, None, "must set advantages or call_advantages", "make one for each episode")
    if group.advantages is not None:
        if len(group.advantages) != size:
            raise DataflowError(where, len(group.advantages), f"advantages must be {size}, one per episode", _MEND)
        group.advantages = [_number(where, "advantages", a) for a in group.advantages]
    if group.call_advantages is not None:
        _check_calls(where, group, size)
        group.call_advantages = [tuple(_number(where, "call_advantages", a) for a in x) for x in group.call_advantages]
    group.weight = _number(where, "weight", group.weight)
    if group.weight < 0:
        raise DataflowError(where, group.weight, "weight must be >= 0", "use 0 to leave the group out of the loss")


def fixed_parts(group: Group) -> tuple[Any, ...]:
    """What `on_batch` must leave alone, copied."""
    lists = (group.episode_ids, group.rewards, group.rewards_per_call, group.num_tokens, group.num_truncated)
    return (group.group_id, group.policy, group.task, *(list(x) for x in (*lists, group.min_version, group.errors)))


def _check_lengths(where: str, group: Group) -> None:
    size = len(group.episode_ids)
    lists: tuple[Sized, ...] = (
        group.rewards,
        group.rewards_per_call,
        group.metrics,
        group.num_tokens,
        group.min_version,
        group.errors,
    )
    if {*map(len, lists)} == {size}:
        return
    names = ("rewards", "rewards_per_call", "metrics", "num_tokens", "min_version", "errors")
    name, length = next((n, len(x)) for n, x in zip(names, lists, strict=True) if len(x) != size)
    raise DataflowError(where, length, f"{name} must be {size}, one per episode", _MEND)


def _check_calls(where: str, group: Group, size: int) -> None:
    calls = group.call_advantages or []
    if len(calls) != size:
        raise DataflowError(where, len(calls), f"call_advantages must be {size} tuples, one per episode", _MEND)
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
        raise DataflowError(where, value, f"{field} must be finite numbers (float32)", _MEND)
    return number
