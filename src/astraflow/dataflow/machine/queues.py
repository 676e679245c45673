"""Per policy: complete groups wait ordered by oldest weight version, leave as batches, and are kept until a checkpoint.

```
 push ─► queue (heap: oldest version, arrival) ─take(v)─► batch of step v+1 ─ack─► trained ─cover─► forgotten
              │ older than v - max_staleness                  ▲        │
              └─► dropped "stale"                             └────────┘ resume(c): steps c+1.. are served again
```

There is at most one batch per `(policy, step)`, so asking again, a crash of the trainer, or another trainer that takes
over all get the same rows, and nothing is ever trained twice.
"""

from __future__ import annotations

import heapq

import numpy as np

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine.commands import BatchGrant, Event, MetricsRow, Refusal, Wake
from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import Batch, PolicyState, QueuedGroup
from astraflow.wire import messages


def batch_id(policy: str, step: int) -> str:
    """Identity of a batch."""
    return f"{policy}/{step}"


class Queues:
    """The queues, batches and trainers of all policies."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def push(self, name: str, group: QueuedGroup) -> bool:
        """A complete group starts to wait; False: too old or too late, it was dropped at once."""
        policy = self._context.state.policies[name]
        if (reason := self.too_late(name, group.min_version)) is not None:
            self._drop(name, group, reason)
            return False
        heapq.heappush(policy.queue, (group.min_version, policy.num_arrived, group))
        policy.num_arrived += 1
        if len(policy.queue) >= self._context.plan.policies[name].groups:
            self._context.out.append(Wake(name))
        return True

    def too_late(self, name: str, min_version: int) -> str | None:
        """Why a group with such a token cannot be trained any more; None: it can."""
        if self._context.finished_policy(name):
            return "finished"
        return "stale" if min_version < self.oldest_allowed(name) else None

    def oldest_allowed(self, name: str) -> int:
        """The oldest version that the next step may train on."""
        return max(0, self._context.state.policies[name].latest - self._context.plan.policies[name].max_staleness)

    def ready(self, name: str, version: int) -> bool:
        """A trainer at `version` would get a batch now."""
        policy = self._context.state.policies[name]
        return version + 1 in policy.batches or len(policy.queue) >= self._context.plan.policies[name].groups

    def take(self, name: str, trainer_id: str, version: int) -> BatchGrant | None:
        """The batch of step `version + 1`, formed now or before; None: not enough groups wait."""
        policy = self.current(name, trainer_id)
        if version >= self._context.plan.steps:
            raise Refusal(410, f"policies.{name}.version={version} has reached run.steps; the run is over for it")
        step = version + 1
        if step not in policy.batches:
            self._check_next(name, policy, version)
            if not self._form(name, policy, step):
                return None
        policy.batches[step].holder = trainer_id
        policy.version = version
        return BatchGrant(name, step)

    def ack(self, name: str, trainer_id: str, acked_id: str, version: int, metrics: dict[str, float]) -> None:
        """The batch was trained and `version` is published."""
        policy = self.current(name, trainer_id)
        if acked_id != batch_id(name, version) or version > policy.latest + 1 or version < 1:
            raise Refusal(404, f"batch={acked_id} is not known; acknowledge '{name}/<step>' with version=<step>")
        if version == policy.latest + 1:
            if version not in policy.batches:
                raise Refusal(404, f"batch={acked_id} was never handed out; ask for it first")
            self._train(name, policy, version, metrics)
        policy.version = max(policy.version, version)

    def cover(self, name: str, trainer_id: str, version: int) -> None:
        """A checkpoint of `version` exists: batches up to it are forgotten."""
        policy = self.current(name, trainer_id)
        if version > policy.latest:
            raise Refusal(
                409, f"policies.{name}.checkpoint={version} is newer than the acknowledged version {policy.latest}; "
                "acknowledge the step before its checkpoint"
            )  # fmt: skip
        policy.covered = max(policy.covered, version)
        for step in [s for s in policy.batches if s <= version]:
            for group in policy.batches.pop(step).groups:
                accounts.release_entries(self._context, group.entries)

    def resume(self, name: str, resume: messages.Resume) -> messages.ResumeReply:
        """A trainer starts at a version; every batch after it is served again, in order."""
        policy = self._policy(name)
        version = resume.version
        if version == policy.latest + 1 and version in policy.batches:
            self._train(name, policy, version, {})  # published and saved, but its acknowledgement never arrived
        if version > max(policy.latest, 0) or version < 0:
            raise Refusal(
                409, f"policies.{name}.version={version} is newer than the run knows ({policy.latest}); "
                "start the trainer from a checkpoint of this run directory"
            )  # fmt: skip
        if version < policy.covered:
            raise Refusal(
                409, f"policies.{name}.version={version} is older than checkpoint {policy.covered}: its batches are "
                "gone; a newer checkpoint is damaged (the trainer's log names it) or --run-dir is wrong: check it, "
                f"and resume from checkpoint {policy.covered} or a newer one"
            )  # fmt: skip
        policy.trainer_id, policy.urls, policy.version = resume.trainer_id, resume.urls, version
        policy.latest = max(policy.latest, version)
        for batch in policy.batches.values():
            batch.holder = ""
        replayed = policy.latest - version
        self._context.out.append(Event("trainer_resumed", {"policy": name, "version": version, "replayed": replayed}))
        self._context.out += [Wake("leases"), Wake(name)]
        return messages.ResumeReply(replayed, policy.latest)

    def current(self, name: str, trainer_id: str) -> PolicyState:
        """The policy, when `trainer_id` is its trainer; else refused."""
        policy = self._policy(name)
        if not policy.trainer_id:
            raise Refusal(409, f"policies.{name}.trainer={trainer_id} has not resumed; call resume first")
        if trainer_id != policy.trainer_id:
            raise Refusal(
                409, f"policies.{name}.trainer={trainer_id} was replaced by {policy.trainer_id}; "
                "stop this trainer, or call resume to take over"
            )  # fmt: skip
        return policy

    def _policy(self, name: str) -> PolicyState:
        policies = self._context.state.policies
        if name not in policies:
            raise Refusal(404, f"policy={name} is not a policy of this run; known: {', '.join(policies)}")
        return policies[name]

    def _check_next(self, name: str, policy: PolicyState, version: int) -> None:
        if version > policy.latest:
            raise Refusal(409, f"policies.{name}.version={version} is not acknowledged; acknowledge it first")
        if version < policy.latest:
            raise Refusal(
                409, f"policies.{name}.version={version} is behind {policy.latest} and its batch is gone; "
                f"resume from checkpoint {policy.covered}"
            )  # fmt: skip

    def _form(self, name: str, policy: PolicyState, step: int) -> bool:
        wanted = self._context.plan.policies[name].groups
        self._drop_stale(name, policy)
        if len(policy.queue) < wanted:
            return False
        groups = [heapq.heappop(policy.queue)[2] for _ in range(wanted)]
        metrics = batch_metrics(groups, step - 1, self._context.plan.policies[name].max_staleness)
        metrics["queue/groups"] = float(len(policy.queue))
        policy.batches[step] = Batch(step, groups, metrics)
        policy.dropped_in_row = policy.failed_in_row = 0
        return True

    def _train(self, name: str, policy: PolicyState, step: int, metrics: dict[str, float]) -> None:
        batch = policy.batches[step]
        batch.acked, policy.latest = True, step
        for group in batch.groups:
            accounts.settle_trained(self._context, name, group.group_id)
        account = {f"groups/dropped/{reason}": float(n) for reason, n in policy.dropped.items()}
        account |= {
            "groups/admitted": float(policy.admitted),
            "groups/trained": float(policy.trained),
            "groups/dropped": float(policy.num_dropped),
            "groups/in_flight": float(policy.in_flight),
        }
        row = MetricsRow("step", name, step, self._context.now, {**batch.metrics, **account, **metrics})
        self._context.out += [row, Event("step", {"policy": name, "step": step, **row.metrics})]
        self._drop_stale(name, policy)
        if self._context.finished_policy(name):
            while policy.queue:
                self._drop(name, heapq.heappop(policy.queue)[2], "finished")
        self._context.out += [Wake("leases"), Wake(name)]

    def _drop_stale(self, name: str, policy: PolicyState) -> None:
        while policy.queue and policy.queue[0][0] < self.oldest_allowed(name):
            self._drop(name, heapq.heappop(policy.queue)[2], "stale")

    def _drop(self, name: str, group: QueuedGroup, reason: str) -> None:
        accounts.release_entries(self._context, group.entries)
        accounts.settle_dropped(self._context, name, group.group_id, reason)


def batch_metrics(groups: list[QueuedGroup], version: int, max_staleness: int) -> dict[str, float]:
    """What the batch is made of; staleness is per trajectory: `version` minus the oldest of its sampled tokens."""
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
        "episodes/truncated": sum(e.part.num_truncated for e in entries) / max(num_rows, 1),
        "staleness/mean": float(staleness.mean()),
        "staleness/p99": float(np.percentile(staleness, 99)),
        "staleness/max": float(staleness.max()),
        "batch/groups": float(len(groups)),
        "batch/episodes": float(len(entries)),
        "batch/trajectories": float(num_rows),
    }
    counts = np.bincount(np.clip(staleness, 0, max_staleness), minlength=max_staleness + 1)
    metrics |= {f"staleness/count/{i}": float(n) for i, n in enumerate(counts)}
    return metrics
