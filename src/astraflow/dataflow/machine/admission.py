"""Which task is next, and whether it may start: the source cursor and the staleness gate.

**The gate.** Let G be `batch.groups`, S `batch.max_staleness`, v the newest version and F the groups admitted and
neither trained nor dropped. A group is admitted while F < (S + 1) * G for every policy. A group admitted at version v
finds at most (S + 1) * G - 1 others in flight, so by the time those are trained, S further steps have been taken
and this group is in the next one: the trainer is then at most at v + S, hence staleness <= S as long as groups leave in
the order of their age. Groups that overtake break that argument, not the bound: the check at hand-out is hard.
Example: G = 16, S = 0: 16 groups are admitted, nothing more until their step is acknowledged: synchronous training.

Never more groups are admitted than the remaining steps need, so nothing is played for nothing at the end.
"""

from __future__ import annotations

import zlib

import numpy as np

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import OpenGroup


class Admission:
    """Opens groups from the training source, in a seeded shuffle of each epoch; the source never runs dry."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._shuffled: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def limit(self, name: str) -> int:
        """Groups of policy `name` that may be in flight now."""
        plan, policy = self._context.plan, self._context.state.policies[name]
        groups = plan.policies[name].groups
        ahead = (plan.policies[name].max_staleness + 1) * groups
        return max(0, min(ahead, (plan.steps - policy.latest) * groups))

    @property
    def open(self) -> bool:
        """A further group may start."""
        context = self._context
        if not context.all_resumed or context.training_over:
            return False
        return all(
            policy.in_flight < self.limit(name)
            for name, policy in context.state.policies.items()
            if not context.finished_policy(name)
        )

    def next_group(self) -> OpenGroup:
        """Admit the next task of the training source."""
        context = self._context
        state, plan = context.state, context.plan
        row = self._order(state.epoch)[state.position]
        group_id = f"{plan.train_source}/{state.epoch}/{row}"
        group = open_group(context, group_id, plan.train_source, int(row), state.epoch)
        state.position += 1
        if state.position == plan.num_rows:
            state.epoch, state.position = state.epoch + 1, 0
        accounts.admit(context, group.group_id)
        return group

    def _order(self, epoch: int) -> np.ndarray:
        if self._shuffled[0] != epoch:
            plan = self._context.plan
            key = [plan.seed, epoch, zlib.crc32(plan.train_source.encode())]
            self._shuffled = (epoch, np.random.Generator(np.random.PCG64(key)).permutation(plan.num_rows))
        return self._shuffled[1]


def open_group(context: Context, group_id: str, source: str, row: int, epoch: int, samples: int = 0) -> OpenGroup:
    """A group with no episode leased yet; `samples` > 0: of an evaluation round."""
    state = context.state
    size = samples or context.plan.group_size
    group = OpenGroup(
        group_id=group_id,
        source=source,
        row=row,
        epoch=epoch,
        seq=state.num_groups,
        purpose="eval" if samples else "train",
        attempts=[0] * size,
        losses=[0] * size,
        holders=[None] * size,
        results=[None] * size,
        num_open=size,
    )
    state.num_groups += 1
    state.groups[group_id] = group
    return group
