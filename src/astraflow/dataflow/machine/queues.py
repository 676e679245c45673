"""Per policy: complete groups wait in order, leave as batches, and are kept until a checkpoint covers their batch.

```
 push ─► waiting (edf | fifo) ─take(v)─► batch of step v+1 ─ack─► trained ─cover─► forgotten
              │ older than          ▲          ▲        │   └─► stored by an operator ─► part of a later batch
              │ v - max_staleness   └ rest of a cut group
              └─► dropped "stale"              └────────┘ resume(c): steps c+1.. are served again
```

There is at most one batch per `(policy, step)`, so asking again, a crash of the trainer, or another trainer that takes
over all get the same rows, and nothing is trained twice but what an operator selects to be (`serving.replay`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine.commands import BatchGrant, Event, MetricsRow, Refusal, Wake
from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import Batch, PolicyState, QueuedGroup
from astraflow.dataflow.machine.serving import damage, forming, pacing
from astraflow.dataflow.machine.serving.replay import Replay
from astraflow.dataflow.operators.chain import Chain
from astraflow.errors import DataflowError
from astraflow.wire import messages


def batch_id(policy: str, step: int) -> str:
    """Identity of a batch."""
    return f"{policy}/{step}"


class Queues:
    """The queues, batches and trainers of all policies. `chains`: the operators of each."""

    def __init__(self, context: Context, chains: Mapping[str, Chain]) -> None:
        self._context, self._chains = context, chains
        self._replays = {name: Replay(context, name, chain.operators) for name, chain in chains.items()}

    def push(self, name: str, group: QueuedGroup) -> bool:
        """A complete group starts to wait; False: too old or too late, it was dropped at once."""
        if (reason := self.too_late(name, group.min_version)) is not None:
            self._drop(name, group, reason)
            return False
        self._context.waiting[name].push(group)
        if pacing.ready(self._context, name):
            self._context.out.append(Wake(name))
        return True

    def too_late(self, name: str, min_version: int) -> str | None:
        """Why a group with such a token cannot be trained any more; None: it can."""
        if self._context.finished_policy(name):
            return "finished"
        return "stale" if min_version < self.oldest_allowed(name) else None

    def changes_batches(self, name: str) -> bool:
        """Operators of the policy give groups other advantages or weights when a batch is formed."""
        return self._chains[name].works_on_batches

    def oldest_allowed(self, name: str) -> int:
        """The oldest version that the next step may train on."""
        return max(0, self._context.state.policies[name].latest - self._context.plan.policies[name].max_staleness)

    def ready(self, name: str, version: int) -> bool:
        """A trainer at `version` would get a batch now."""
        policy = self._context.state.policies[name]
        return version + 1 in policy.batches or pacing.ready(self._context, name)

    def take(self, name: str, trainer_id: str, version: int) -> BatchGrant | None:
        """The batch of step `version + 1`, formed now or before; None: not enough groups wait."""
        policy = self.current(name, trainer_id)
        if version >= self._context.plan.policies[name].steps:
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
            raise Refusal(
                404,
                f"batch={acked_id} is not known; acknowledge '{name}/<step>' with version=<step>",
                reason="unknown_batch",
            )
        if version == policy.latest + 1:
            if version not in policy.batches:
                raise Refusal(404, f"batch={acked_id} was never handed out; ask for it first", reason="unknown_batch")
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

    def drop_damaged(self, keys: Collection[int]) -> None:
        """Rows in these puts are damaged: groups that need them cannot be trained."""
        for name, replay in self._replays.items():
            damage.drop_damaged(self._context, name, keys, replay.max_age)
            self._context.out.append(Wake(name))

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
            raise Refusal(
                404, f"policy={name} is not trained in this run; known: {', '.join(policies)}", reason="unknown_policy"
            )
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
        context, replay = self._context, self._replays[name]
        self._drop_stale(name, policy)  # `_train` did, unless the run was resumed with a lower batch.max_staleness
        if not pacing.ready(context, name):
            return False
        picked = forming.pick(context, name)
        try:
            groups = forming.credited(context, name, self._chains[name], [*picked.again, *picked.fresh], step)
            metrics = forming.batch_metrics(groups, step - 1, replay.max_age)
        except DataflowError as error:
            forming.undo(context, name, picked)
            accounts.fail_by(context, error)
            return False
        num_again = len(picked.again)
        for group in picked.again:
            accounts.retain_entries(context, group.entries)
        metrics |= {"queue/groups": float(policy.num_waiting), "batch/replayed_groups": float(num_again)}
        equal = policy.dropped.get("zero_variance", 0)
        metrics["groups/zero_variance_fraction"] = forming.equal_share(picked.fresh, equal - policy.equal_before)
        policy.equal_before = equal
        batch = Batch(step, groups, metrics, num_replayed=num_again)
        if replay.stores and groups[num_again:] != picked.fresh:
            batch.originals = picked.fresh
        policy.batches[step] = batch
        policy.recent = pacing.remembered(policy, picked.num_fresh, num_again)
        policy.selected = []
        policy.owed = max(0, policy.owed - num_again)
        policy.dropped_in_row = policy.failed_in_row = 0
        return True

    def _train(self, name: str, policy: PolicyState, step: int, metrics: dict[str, float]) -> None:
        batch = policy.batches[step]
        batch.acked, policy.latest = True, step
        for group in batch.groups[batch.num_replayed :]:
            if policy.rest is None or policy.rest.group.group_id != group.group_id:
                accounts.settle_trained(self._context, name, group.group_id)
        self._replays[name].settle(batch)
        account = {f"groups/dropped/{reason}": float(n) for reason, n in policy.dropped.items()}
        account |= {f"episodes/dropped/{reason}": float(n) for reason, n in policy.dropped_episodes.items()}
        account |= accounts.of_sources(self._context)
        account |= {
            "groups/admitted": float(policy.admitted),
            "groups/trained": float(policy.trained),
            "groups/dropped": float(policy.num_dropped),
            "groups/in_flight": float(policy.in_flight),
            "groups/replayed": float(policy.num_replayed),
        }
        row = MetricsRow("step", name, step, self._context.now, {**batch.metrics, **account, **metrics})
        self._context.out += [row, Event("step", {**row.metrics, "policy": name, "step": step})]
        self._drop_stale(name, policy)
        if self._context.finished_policy(name):
            self._drop_rest(name, policy, "finished")
            while policy.queue:
                self._drop(name, self._context.waiting[name].pop()[1], "finished")
        self._context.out += [Wake("leases"), Wake(name)]

    def _drop_stale(self, name: str, policy: PolicyState) -> None:
        oldest = self.oldest_allowed(name)
        for group in self._context.waiting[name].pop_older(oldest):
            self._drop(name, group, "stale")
        if policy.rest is not None and policy.rest.group.min_version < oldest:
            self._drop_rest(name, policy, "stale")

    def _drop_rest(self, name: str, policy: PolicyState, reason: str) -> None:
        """The rest of a cut group will not be trained: the group counts as trained, its pieces are acknowledged."""
        rest, policy.rest = policy.rest, None
        if rest is not None:
            accounts.release_entries(self._context, rest.group.entries)
            accounts.drop_episodes(self._context, name, rest.group.group_id, len(rest.group.entries), reason)
            accounts.settle_trained(self._context, name, rest.group.group_id)

    def _drop(self, name: str, group: QueuedGroup, reason: str) -> None:
        accounts.release_entries(self._context, group.entries)
        accounts.settle_dropped(self._context, name, group.group_id, reason)
