"""Rows that turned out to be damaged when they were read: the groups that need them are dropped, the run goes on.

| where such a group is             | what happens to it                                                        |
|-----------------------------------|---------------------------------------------------------------------------|
| waits for stages or a batch       | dropped, "damaged"                                                        |
| in a batch that is not trained    | dropped, "damaged"; the batch is smaller, or is formed anew if it is empty |
| in a batch that is trained        | counted already; the batch is smaller when it is served again             |
| stored, to be trained again       | forgotten                                                                 |
| in the log of consumers           | loses those entries                                                       |
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import Batch, Entry, Failed, PolicyState, QueuedGroup
from astraflow.dataflow.machine.serving import forming

REASON = "damaged"


def needs(entry: Entry, keys: Collection[int]) -> bool:
    """Some row of the entry lies in one of these puts."""
    return entry.part.put in keys or any(added.put in keys for added in entry.added)


def drop_damaged(context: Context, name: str, keys: Collection[int], max_age: int) -> None:
    """Groups of policy `name` with rows in these puts. `max_age`: staleness up to which a batch may be."""
    policy = context.state.policies[name]

    def bad(group: QueuedGroup) -> bool:
        return any(needs(entry, keys) for entry in group.entries)

    for arrival in [a for a, group in policy.queue.items() if bad(group)]:
        group = context.waiting[name].take(arrival)
        accounts.release_entries(context, group.entries)
        accounts.settle_dropped(context, name, group.group_id, REASON)
    for step, batch in list(policy.batches.items()):
        if any(map(bad, batch.groups)):
            _shrink(context, name, batch, bad, max_age)
            if len(batch.groups) == batch.num_replayed and not batch.acked:
                _forget(context, policy, step)
            elif not batch.groups:
                _cannot_be_served_again(context, name, step)
    if policy.rest is not None and bad(policy.rest.group):
        rest, policy.rest = policy.rest.group, None
        accounts.release_entries(context, rest.entries)
        accounts.drop_episodes(context, name, rest.group_id, len(rest.entries), REASON)
        accounts.settle_trained(context, name, rest.group_id)
    for group_id in [i for i, stored in policy.stored.items() if bad(stored.group)]:
        accounts.release_entries(context, policy.stored.pop(group_id).group.entries)
        policy.selected = [x for x in policy.selected if x != group_id]
    _thin_log(context, name, keys, bad)


def _shrink(context: Context, name: str, batch: Batch, bad: Callable[[QueuedGroup], bool], max_age: int) -> None:
    policy, again = context.state.policies[name], batch.num_replayed
    for number, group in enumerate(batch.groups):
        if not bad(group):
            continue
        accounts.release_entries(context, group.entries)
        batch.num_replayed -= number < again
        if number >= again and not batch.acked:
            _settle(context, name, policy, batch, group)
    batch.groups = [group for group in batch.groups if not bad(group)]
    batch.originals = [group for group in batch.originals if not bad(group)]
    if batch.groups:
        batch.metrics |= forming.batch_metrics(batch.groups, batch.step - 1, max_age)


def _settle(context: Context, name: str, policy: PolicyState, batch: Batch, group: QueuedGroup) -> None:
    """A fresh group, or the piece of a cut one: then the group counts as trained with its last piece."""
    others = any(
        g.group_id == group.group_id
        for step, other in policy.batches.items()
        if step < batch.step
        for g in other.groups[other.num_replayed :]
    )
    rest = policy.rest is not None and policy.rest.group.group_id == group.group_id
    if others or rest:
        accounts.drop_episodes(context, name, group.group_id, len(group.entries), REASON)
    if others and not rest:
        accounts.settle_trained(context, name, group.group_id)
    elif not rest:
        accounts.settle_dropped(context, name, group.group_id, REASON)


def _forget(context: Context, policy: PolicyState, step: int) -> None:
    """Nothing new is left in the batch and nobody has trained it: it is formed anew."""
    policy.owed += len(policy.batches[step].groups)
    for group in policy.batches.pop(step).groups:
        accounts.release_entries(context, group.entries)


def _cannot_be_served_again(context: Context, name: str, step: int) -> None:
    cause = Failed(
        "JournalError", f"policies.{name}.batch", str(step), "was trained, and all of its rows are damaged now",
        "restore the segments, or resume the trainer from a newer checkpoint",
    )  # fmt: skip
    accounts.fail(context, cause)


def _thin_log(context: Context, name: str, keys: Collection[int], bad: Callable[[QueuedGroup], bool]) -> None:
    log = context.state.logs.get(name)
    for number, group in enumerate(log.groups if log is not None else []):
        if log is not None and bad(group):
            kept = [entry for entry in group.entries if not needs(entry, keys)]
            accounts.release_entries(context, (entry for entry in group.entries if needs(entry, keys)))
            log.groups[number] = msgspec.structs.replace(group, entries=kept)
