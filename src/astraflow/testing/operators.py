"""For tests of operators: groups out of rewards, and what every operator of a policy must do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from astraflow.contracts import Operator
from astraflow.dataflow.operators.chain import Chain
from astraflow.dataflow.operators.credit.relative import DrGrpo
from astraflow.types import Group, Task, Tokens


def group(rewards: Sequence[float | None], row: int = 0, source: str = "train", **changes: Any) -> Group:
    """A complete group with these rewards: one call and 3 sampled tokens per episode, version 0. `changes`: fields."""
    n = len(rewards)
    made = Group(
        group_id=f"{source}/0/{row}",
        policy="actor",
        task=Task(source, row, 0, {"question": f"q{row}"}),
        episode_ids=[f"{source}/0/{row}/{k}" for k in range(n)],
        rewards=list(rewards),
        rewards_per_call=[()] * n,
        num_calls=[1] * n,
        metrics=[{}] * n,
        num_tokens=[3] * n,
        num_truncated=[0] * n,
        min_version=[0] * n,
        errors=[None] * n,
    )
    return msgspec.structs.replace(made, **changes)


def tokens(ids: Sequence[int], given: int = 0) -> Tokens:
    """One branch of these ids, of which the first `given` were not sampled."""
    sampled = np.arange(len(ids)) >= given
    return Tokens(
        token_ids=np.array(ids, np.int32),
        loss_mask=sampled,
        behavior_logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        call_index=np.where(sampled, 0, -1).astype(np.int16),
    )


def chain(*operators: Operator, advantage: Operator | None = None) -> Chain:
    """A chain of a policy "actor"; without an estimator of its own it has `DrGrpo`."""
    return Chain("policies.actor", operators, advantage or DrGrpo())


def check_operator(make: Callable[[], Operator], groups: Sequence[Group]) -> None:
    """What the dataflow relies on: the contract of each hook, and that state that went through JSON goes on the same.

    Args: make: a new operator of a policy with the options to be tested; groups: complete ones, `tokens` if needed.
    Raises: AssertionError or DataflowError: naming what does not hold.
    """
    straight, resumed = _chain_of(make), _chain_of(make)
    for step, one in enumerate(groups, start=1):
        results = [_run(x, one, step) for x in (straight, resumed)]
        assert results[0] == results[1], f"{one.group_id}: not the same from the same state"
        states = resumed.state_dicts()
        read = json.loads(json.dumps(states))
        assert json.loads(msgspec.json.encode(states)) == read, "the state is not JSON"
        resumed = _chain_of(make)
        resumed.load_state_dicts(read)
        assert json.loads(json.dumps(resumed.state_dicts())) == read, "load_state_dict is not the inverse of state_dict"


def _chain_of(make: Callable[[], Operator]) -> Chain:
    operator = make()
    return chain(advantage=operator) if operator.phase == "credit" else chain(operator)


def _run(own: Chain, given: Group, step: int) -> str | list[Any]:
    group = copy.deepcopy(given)
    result = own.on_group(group, lambda: given.tokens or [[] for _ in given.episode_ids])
    if isinstance(result, str):
        return result
    own.on_batch([result], step)
    return [result.rewards, result.advantages, result.call_advantages, result.weight]
