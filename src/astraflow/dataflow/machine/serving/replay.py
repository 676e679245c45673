"""Trained groups that are trained again: kept while an operator retains them, chosen when a step is acknowledged.

```
 acked batch ─► retain(stored + fresh of the batch) ─► stored ─► select ─► selected: part of the next batch
                     └─► not named: rows released
```

The choice for step v + 1 is made when step v is acknowledged, so the gate knows how many fresh groups the next batch
needs, and whether a batch is ready is known without asking an operator. What is older than the bound is not stored.
Groups that were selected and gave way to fresh ones (`pacing.trained_again`) are owed: others come later instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from astraflow.contracts import Operator
from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine.plan import Context, PolicyPlan
from astraflow.dataflow.machine.records import Batch, Entry, PolicyState, QueuedGroup, StoredGroup
from astraflow.dataflow.machine.serving.pacing import expected_groups, fitting
from astraflow.dataflow.machine.serving.waiting import NOTHING
from astraflow.dataflow.operators.blame import blamed
from astraflow.errors import DataflowError
from astraflow.types import Stored


class Replay:
    """The stored groups of one policy. `operators`: its list; those that override `select` or `retain` are asked."""

    def __init__(self, context: Context, name: str, operators: Sequence[Operator]) -> None:
        self._context, self._name = context, name
        self._operators = [o for o in operators if _stores(o)]
        ages = [o.max_age for o in self._operators if o.max_age is not None]
        self.max_age: int = max(ages, default=self._plan.max_staleness)
        policy = self._policy
        oldest = policy.latest - self.max_age  # the bound may have been changed since
        policy.selected = [i for i in policy.selected if policy.stored[i].group.min_version >= oldest]

    @property
    def stores(self) -> bool:
        """Some operator may retain groups."""
        return bool(self._operators)

    @property
    def _plan(self) -> PolicyPlan:
        return self._context.plan.policies[self._name]

    @property
    def _policy(self) -> PolicyState:
        return self._context.state.policies[self._name]

    def settle(self, batch: Batch) -> None:
        """A batch was acknowledged: what is stored from now on, and what of it the next batch trains again."""
        if not self._operators:
            return
        context, policy = self._context, self._policy
        again = batch.groups[: batch.num_replayed]
        policy.num_replayed += len(again)
        for group in again:
            if (known := policy.stored.get(group.group_id)) is not None:
                policy.stored[group.group_id] = StoredGroup(known.group, batch.step, known.uses + 1)
        for group in batch.originals or batch.groups[batch.num_replayed :]:
            accounts.retain_entries(context, group.entries)
            known = policy.stored.get(group.group_id)
            policy.stored[group.group_id] = (
                StoredGroup(group, batch.step, 1) if known is None else _joined(known, group, batch.step)
            )
        policy.selected = []
        if context.finished_policy(self._name):
            self._keep(())
            return
        oldest = batch.step - self.max_age
        self._keep([i for i, s in policy.stored.items() if s.group.min_version >= oldest])
        try:
            self._decide(batch.step)
        except DataflowError as error:  # nothing is trained again before the operator is mended
            accounts.fail_by(context, error)

    def _decide(self, step: int) -> None:
        policy, plan = self._policy, self._plan
        kept = [i for o in self._operators for i in self._asked(o, lambda o: o.retain(_views(policy), step))]
        self._keep(kept)
        groups, views = expected_groups(plan, policy), _views(policy)
        chosen = self._chosen(views, groups, step + 1)
        owed, more = min(policy.owed, groups), list[str]()
        if owed:  # a quarter of it at a time, so that no batch is made of old groups only
            rest = [view for view in views if view.group_id not in chosen]
            more = self._chosen(rest, groups, step + 1)[: math.ceil(owed / 4)]
        policy.owed = owed + len(chosen)
        fits = fitting(plan, NOTHING, [policy.stored[i].group for i in dict.fromkeys([*chosen, *more])])
        policy.selected = [group.group_id for group in fits]

    def _chosen(self, views: Sequence[Stored], groups: int, step: int) -> list[str]:
        given = [i for o in self._operators for i in self._asked(o, lambda o: o.select(views, groups, step))]
        return list(dict.fromkeys(given))

    def _asked(self, operator: Operator, ask: Callable[[Operator], list[str]]) -> list[str]:
        thing = f"policies.{self._name} {type(operator).__name__}"
        with blamed(thing, "failed in select or retain"):
            given = list(ask(operator))
            if unknown := [i for i in given if i not in self._policy.stored]:
                raise DataflowError(
                    thing, unknown[0], "is not one of the stored groups", "give ids of what it was given"
                )
        return given

    def _keep(self, group_ids: Sequence[str]) -> None:
        """Release all stored groups but these."""
        policy, wanted = self._policy, set(group_ids)
        for group_id in [i for i in policy.stored if i not in wanted]:
            accounts.release_entries(self._context, policy.stored.pop(group_id).group.entries)


def _stores(operator: Operator) -> bool:
    return type(operator).select is not Operator.select or type(operator).retain is not Operator.retain


def _views(policy: PolicyState) -> list[Stored]:
    return [_view(stored) for stored in policy.stored.values()]


def _view(stored: StoredGroup) -> Stored:
    group = stored.group
    rewards = [e.part.reward for e in group.entries if e.part.reward is not None]
    return Stored(
        group_id=group.group_id,
        source=group.group_id.rsplit("/", 2)[0],
        step=stored.step,
        uses=stored.uses,
        min_version=group.min_version,
        mean_abs_advantage=sum(map(_abs_advantage, group.entries)) / len(group.entries),
        mean_reward=sum(rewards) / max(len(rewards), 1),
    )


def _abs_advantage(entry: Entry) -> float:
    calls = entry.call_advantages
    return sum(map(abs, calls)) / len(calls) if calls else abs(entry.advantage)


def _joined(stored: StoredGroup, piece: QueuedGroup, step: int) -> StoredGroup:
    """A stored group and a further piece of it that was trained."""
    group = stored.group
    oldest, entries = min(group.min_version, piece.min_version), [*group.entries, *piece.entries]
    return StoredGroup(QueuedGroup(group.group_id, group.weight, oldest, entries), step, stored.uses)
