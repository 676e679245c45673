"""The accounting law as a number: 0, always. What is in flight is counted group by group, where it is kept."""

from __future__ import annotations

from astraflow.dataflow.machine.records import State


def num_held(state: State, name: str) -> int:
    """Groups of policy `name` that are being played, wait for stages or a batch, or are in a batch not yet trained."""
    policy = state.policies[name]
    held = {g.group_id for g in state.groups.values() if g.purpose == "train"} & _open_for(state, name)
    held |= {g.group_id for g in policy.queue.values()}
    held |= {g.group_id for g in state.staged.values() if g.policy == name}
    held |= {g.group_id for b in policy.batches.values() if not b.acked for g in b.groups[b.num_replayed :]}
    if policy.rest is not None:
        held.add(policy.rest.group.group_id)
    return len(held)


def imbalance(state: State, name: str) -> int:
    """`admitted - trained - dropped - in flight` of one policy; anything but 0 is a fault of AstraFlow."""
    policy = state.policies[name]
    return policy.admitted - policy.trained - sum(policy.dropped.values()) - num_held(state, name)


def task_imbalance(state: State) -> int:
    """The same over all policies, in tasks."""
    return state.admitted - state.trained - sum(state.dropped.values()) - len(state.tasks)


def _open_for(state: State, name: str) -> set[str]:
    return {group_id for group_id, account in state.tasks.items() if name in account.open_policies}
