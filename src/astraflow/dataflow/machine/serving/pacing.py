"""What a batch is, what the next one is made of, and how many groups may therefore be in flight (`limit`, the gate)."""

from __future__ import annotations

import math

from astraflow.dataflow.machine.plan import Context, PolicyPlan
from astraflow.dataflow.machine.records import PolicyState, QueuedGroup
from astraflow.dataflow.machine.serving.waiting import Size, size_of

RECENT_BATCHES = 8


def full(plan: PolicyPlan, size: Size) -> bool:
    """So much is a batch."""
    if plan.episodes:
        return size.episodes >= plan.episodes
    return size.groups >= plan.groups or 0 < plan.tokens <= size.tokens


def trained_again(context: Context, name: str) -> list[QueuedGroup]:
    """Selected groups that the next batch has room for.

    At least one fresh group is in every batch, and no group that is in its last step before it is stale gives way.
    """
    plan, policy = context.plan.policies[name], context.state.policies[name]
    if not policy.selected:
        return []
    first = context.waiting[name].last_chance(policy.latest - plan.max_staleness)
    if policy.rest is not None:
        first = first.plus(size_of(policy.rest.group))
    return fitting(plan, first, [policy.stored[i].group for i in policy.selected])


def fitting(plan: PolicyPlan, first: Size, groups: list[QueuedGroup]) -> list[QueuedGroup]:
    """As many of `groups` as fit into a batch beside what is `first`; one fresh group must fit too."""
    taken, total = [], first
    for group in groups:
        total = total.plus(size_of(group))
        if full(plan, total) and (not first.groups or _over(plan, total)):
            break
        taken.append(group)
    return taken


def next_size(context: Context, name: str) -> Size:
    """All that the next batch could have now."""
    policy = context.state.policies[name]
    total = context.waiting[name].size
    if policy.rest is not None:
        total = total.plus(size_of(policy.rest.group))
    for group in trained_again(context, name):
        total = total.plus(size_of(group))
    return total


def ready(context: Context, name: str) -> bool:
    """The next batch is full."""
    return full(context.plan.policies[name], next_size(context, name))


def fresh_groups(plan: PolicyPlan, policy: PolicyState) -> float:
    """Fresh groups of a batch, a piece of a cut group as a fraction: the mean of the last batches.

    Before the first one it is what the settings say; with batch.tokens as few as tokens allow, then more as needed.
    """
    if policy.recent:
        return sum(fresh for fresh, _ in policy.recent) / len(policy.recent)
    if plan.episodes:
        return plan.episodes / plan.group_size
    if plan.tokens:
        return min(plan.groups, math.ceil(plan.tokens / (plan.group_size * plan.sampling["train"].max_tokens)))
    return plan.groups


def remembered(policy: PolicyState, num_fresh: float, num_again: int) -> list[tuple[float, int]]:
    """`PolicyState.recent` with one more batch.

    Fresh groups that took the place of selected ones, because they would have grown stale, count as trained again: the
    gate shall admit fewer of them, else they would take that place for ever.
    """
    gave_way = min(len(policy.selected) - num_again, num_fresh / 2)
    return [*policy.recent, (num_fresh - gave_way, num_again)][-RECENT_BATCHES:]


def expected_groups(plan: PolicyPlan, policy: PolicyState) -> int:
    """All groups of the next batch; an estimate where batches are not made of a number of groups."""
    if not plan.episodes and not plan.tokens:
        return plan.groups
    again = sum(n for _, n in policy.recent) / max(len(policy.recent), 1)
    return max(1, round(fresh_groups(plan, policy) + again))


def most_in_flight(plan: PolicyPlan) -> int:
    """What `limit` never exceeds: every group has at least one scored episode."""
    return (plan.max_staleness + 1) * (plan.episodes or plan.groups)


def limit(context: Context, name: str) -> int:
    """Groups of policy `name` that may be in flight now; the argument is in `dataflow.machine.admission`.

    F < f + S * m: f fresh groups of the batch that is being trained, or else that the next one needs, and m, the mean
    of the last batches, for each of the S steps after it. f is never too small for the batch that a trainer waits for.
    """
    plan, policy = context.plan.policies[name], context.state.policies[name]
    steps_left = plan.steps - policy.latest
    if steps_left <= 0:
        return 0
    mean = fresh_groups(plan, policy)
    batch = policy.batches.get(policy.latest + 1)
    first = _needed(context, name, mean) if batch is None else len(batch.groups) - batch.num_replayed
    ahead = first + min(plan.max_staleness, steps_left - 1) * mean
    return min(math.ceil(ahead - 1e-9), most_in_flight(plan))


def _needed(context: Context, name: str, mean: float) -> float:
    """Fresh groups of the next batch, as far as one can say: what waits, and what that lacks."""
    plan, policy = context.plan.policies[name], context.state.policies[name]
    have, waiting = next_size(context, name), context.waiting[name].size
    num_waiting = waiting.groups + (policy.rest is not None)
    lacking = plan.groups - have.groups
    if not plan.episodes and not plan.tokens:
        return num_waiting + lacking
    if full(plan, have):
        return mean
    if plan.episodes:
        return num_waiting + math.ceil((plan.episodes - have.episodes) / plan.group_size)
    each = waiting.tokens / waiting.groups if waiting.tokens else plan.tokens / mean
    return num_waiting + min(lacking, math.ceil((plan.tokens - have.tokens) / each))


def _over(plan: PolicyPlan, size: Size) -> bool:
    """More than a batch."""
    if plan.episodes:
        return size.episodes > plan.episodes
    return size.groups > plan.groups or 0 < plan.tokens < size.tokens
