"""One batch out of what waits: which groups, where one is cut, what operators make of them, and its metrics."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import Entry, QueuedGroup, Rest
from astraflow.dataflow.machine.serving.pacing import full, trained_again
from astraflow.dataflow.machine.serving.waiting import NOTHING, size_of
from astraflow.dataflow.operators.chain import Chain
from astraflow.errors import DataflowError
from astraflow.observe.summary import staleness_metrics
from astraflow.types import Group, Task


class Picked(NamedTuple):
    """The groups of a batch. `undo` puts everything back as it was."""

    again: list[QueuedGroup]  # trained before
    fresh: list[QueuedGroup]
    num_fresh: float  # pieces of groups are fractions
    popped: list[tuple[int, QueuedGroup]]
    rest_before: Rest | None


def pick(context: Context, name: str) -> Picked:
    """Take the groups of the next batch, which is ready: what is trained again, the rest of a cut group, then fresh."""
    plan, policy, waiting = context.plan.policies[name], context.state.policies[name], context.waiting[name]
    again = trained_again(context, name)
    total = NOTHING
    for group in again:
        total = total.plus(size_of(group))
    before, rest = policy.rest, policy.rest
    fresh: list[QueuedGroup] = []
    popped: list[tuple[int, QueuedGroup]] = []
    num_fresh = 0.0
    while not full(plan, total):
        if rest is not None:
            group, whole = rest.group, rest.num_entries
        else:
            popped.append(waiting.pop())
            group = popped[-1][1]
            whole = len(group.entries)
        rest = None
        room = plan.episodes - total.episodes
        if 0 < room < len(group.entries):
            group, left = _cut(group, room)
            rest = Rest(left, whole)
        fresh.append(group)
        num_fresh += len(group.entries) / whole
        total = total.plus(size_of(group))
    policy.rest = rest
    return Picked(again, fresh, num_fresh, popped, before)


def undo(context: Context, name: str, picked: Picked) -> None:
    """As if `pick` had not been called."""
    for arrival, group in picked.popped:
        context.waiting[name].put_back(arrival, group)
    context.state.policies[name].rest = picked.rest_before


def _cut(group: QueuedGroup, num_entries: int) -> tuple[QueuedGroup, QueuedGroup]:
    return _piece(group, group.entries[:num_entries]), _piece(group, group.entries[num_entries:])


def _piece(group: QueuedGroup, entries: list[Entry]) -> QueuedGroup:
    return QueuedGroup(group.group_id, group.weight, min(e.part.min_version for e in entries), entries)


def credited(context: Context, name: str, chain: Chain, groups: list[QueuedGroup], step: int) -> list[QueuedGroup]:
    """The groups with what operators make of them as a batch; the same objects when no operator works on batches.

    Raises: DataflowError: an operator failed or gave something that its contract does not allow.
    """
    if not chain.works_on_batches:
        return groups
    seen = [_as_group(context, name, group) for group in groups]
    chain.on_batch(seen, step)
    return [_written_back(group, new) for group, new in zip(groups, seen, strict=True)]


def _as_group(context: Context, name: str, group: QueuedGroup) -> Group:
    source, epoch, row = group.group_id.rsplit("/", 2)
    parts, calls = [e.part for e in group.entries], [e.call_advantages for e in group.entries]
    return Group(
        group_id=group.group_id,
        policy=name,
        task=Task(source, int(row), int(epoch), context.fields(source, int(row))),
        episode_ids=[f"{group.group_id}/{e.sibling}" for e in group.entries],
        rewards=[p.reward for p in parts],
        rewards_per_call=[p.rewards_per_call for p in parts],
        num_calls=[p.num_calls for p in parts],
        metrics=[{"success": e.success} for e in group.entries],
        num_tokens=[p.num_tokens for p in parts],
        num_truncated=[p.num_truncated for p in parts],
        min_version=[p.min_version for p in parts],
        errors=[None] * len(parts),
        advantages=[e.advantage for e in group.entries],
        call_advantages=calls if any(calls) else None,
        weight=group.weight,
    )


def _written_back(group: QueuedGroup, new: Group) -> QueuedGroup:
    advantages = new.advantages or [e.advantage for e in group.entries]
    calls = new.call_advantages or [()] * len(group.entries)
    entries = [
        msgspec.structs.replace(entry, advantage=a, call_advantages=tuple(c))
        for entry, a, c in zip(group.entries, advantages, calls, strict=True)
    ]
    return QueuedGroup(group.group_id, new.weight, group.min_version, entries)


def _percentile_99(values: np.ndarray) -> float:
    """As `np.percentile(values, 99)`, which takes ten times as long for a small batch."""
    ordered, place = np.sort(values).tolist(), 0.99 * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def equal_share(fresh: list[QueuedGroup], num_dropped: int) -> float:
    """Of the groups that came in for a batch, the share of equal rewards; `num_dropped` of these are not in it."""
    equal = sum(len(g.entries) > 1 and len({e.part.reward for e in g.entries}) == 1 for g in fresh)
    return (equal + num_dropped) / max(1, len(fresh) + num_dropped)


def batch_metrics(groups: list[QueuedGroup], version: int, max_staleness: int) -> dict[str, float]:
    """What the batch is made of; staleness is per trajectory: `version` minus the oldest of its sampled tokens.

    Raises: DataflowError: one is not finite, which JSON could not say.
    """
    entries = [e for g in groups for e in g.entries]
    rewards = np.array([e.part.reward for e in entries], np.float64)
    tokens = np.array([e.part.num_tokens for e in entries], np.float64)
    oldest = np.array([v for e in entries for v in e.part.min_versions if v >= 0], np.int64)
    staleness = version - oldest if oldest.size else np.zeros(1, np.int64)
    num_rows = sum(len(e.part.rows) for e in entries)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "success/mean": float(np.mean([e.success for e in entries])),
        "tokens/sampled": float(tokens.sum()),
        "tokens/per_episode": float(tokens.mean()),
        "tokens/per_episode_max": float(tokens.max()),
        "episodes/truncated": sum(e.part.num_truncated for e in entries) / max(num_rows, 1),
        "staleness/mean": float(staleness.mean()),
        "staleness/p99": _percentile_99(staleness),
        "staleness/max": float(staleness.max()),
        "batch/groups": float(len(groups)),
        "batch/episodes": float(len(entries)),
        "batch/trajectories": float(num_rows),
    }
    metrics |= staleness_metrics(staleness, max_staleness)
    for key, value in metrics.items():
        if not math.isfinite(value):
            raise DataflowError(
                f"batch of step {version + 1} {key}", value, "must be finite", "report this with the run directory"
            )
    return metrics
