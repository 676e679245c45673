"""From a complete group to the queue of each policy, or to a counted drop.

```
 complete ─► (stages that add "reward") ─► judge: operators ─► pass_on: (stages that add columns) ─► queue
                                                 └─► dropped{reason}
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine.admission.gate import Admission
from astraflow.dataflow.machine.commands import Happened
from astraflow.dataflow.machine.evaluation import Evaluation, success_of
from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.queues import Queues
from astraflow.dataflow.machine.readers.consumers import Consumers
from astraflow.dataflow.machine.readers.stages import Passed, Stages
from astraflow.dataflow.machine.records import Added, Entry, OpenGroup, Part, QueuedGroup, split_id
from astraflow.dataflow.operators.chain import Chain
from astraflow.errors import DataflowError, JournalError
from astraflow.types import Group, Task, Tokens

Parts = Mapping[int, Part]  # sibling -> the policy's share of its episode; only episodes without an error


class Routing:
    """What happens to groups whose episodes are all done."""

    def __init__(
        self,
        context: Context,
        chains: Mapping[str, Chain],
        admission: Admission,
        queues: Queues,
        evaluation: Evaluation,
        stages: Stages,
        consumers: Consumers,
    ) -> None:
        self._context, self._chains, self._admission = context, chains, admission
        self._queues, self._evaluation = queues, evaluation
        self._stages, self._consumers = stages, consumers

    def complete(self, group: OpenGroup) -> None:
        """All episodes of a group are done: evaluation sums it up, training judges it for each policy that wants it."""
        if group.purpose == "eval":
            self._evaluation.complete(group)
            return
        wanted = list(self._context.state.tasks[group.group_id].open_policies)
        parts: dict[str, dict[int, Part]] = {name: {} for name in wanted}
        for k, result in enumerate(group.results):
            if result is not None and result.error is None:
                for part in result.parts:
                    parts.setdefault(part.policy, {})[k] = part
        accounts.release(self._context, (p for name in parts if name not in wanted for p in parts[name].values()))
        for name in wanted:
            own = parts[name]
            if not self._stages.hold_closed(name, group, own):
                self.judge(name, group, own, {})

    def go_on(self, passed: Passed) -> None:
        """A group whose stages are done."""
        group = passed.group
        if group.closed is not None:
            self.judge(group.policy, group.closed, passed.parts, passed.added)
        elif group.queued is not None:
            self._push(group.policy, group.queued)

    def judge(self, name: str, group: OpenGroup, parts: Parts, added: Mapping[int, list[Added]]) -> None:
        """Operators of one policy: passed on or dropped, and rows that nobody needs are released. `added`: by sibling,
        what stages added before.
        """
        seen = as_group(name, group, parts, self._context)
        self._admission.on_result(seen)
        siblings = [k for k, result in enumerate(group.results) if result is not None]  # of the episodes of `seen`
        rewards = {k: r for k, r in zip(siblings, seen.rewards, strict=True) if k in parts}
        result, failed = self._verdict(name, seen, parts)
        entries = [] if isinstance(result, str) else _entries(group, siblings, result, parts, added)
        if not entries and not isinstance(result, str):
            result = accounts.UNSCORED
        if isinstance(result, str):
            accounts.release(self._context, parts.values())
            accounts.release(self._context, (a for columns in added.values() for a in columns))
            accounts.settle_dropped(self._context, name, group.group_id, result, failed=failed)
            return
        used = {e.sibling for e in entries}
        accounts.release(self._context, (part for k, part in parts.items() if k not in used))
        accounts.release(self._context, (a for k, columns in added.items() if k not in used for a in columns))
        unscored = sum(reward is None for k, reward in rewards.items() if k not in used)
        accounts.drop_episodes(self._context, name, group.group_id, unscored, accounts.UNSCORED)
        left_out = len(rewards) - unscored - len(entries)
        accounts.drop_episodes(self._context, name, group.group_id, left_out, accounts.LEFT_OUT)
        oldest = min(e.part.min_version for e in entries)
        judged = {"policy": name, "advantages": [e.advantage for e in entries], "weight": result.weight}
        self._context.out.append(Happened(group.group_id, "judged", judged))
        self.pass_on(name, QueuedGroup(group.group_id, result.weight, oldest, entries))

    def pass_on(self, name: str, group: QueuedGroup) -> None:
        """A group that its operators let through."""
        if not self._stages.hold_queued(name, group):
            self._push(name, group)

    def _push(self, name: str, group: QueuedGroup) -> None:
        if self._queues.push(name, group):
            self._context.out.append(Happened(group.group_id, "queued", {"policy": name}))
            self._consumers.log(name, group)

    def _verdict(self, name: str, seen: Group, parts: Parts) -> tuple[Group | str, bool]:
        """The group with advantages or the reason for dropping it, and whether that is for want of scored episodes."""
        num_scored = sum(r is not None for r in seen.rewards)
        if num_scored < min(2, len(seen.rewards)):
            asked = [split_id(i)[1] in parts for i in seen.episode_ids]
            unscored = zip(seen.rewards, seen.errors, asked, strict=True)
            reason = accounts.failure_reason((error, called) for reward, error, called in unscored if reward is None)
            return reason, reason != accounts.NOT_CALLED

        def read_tokens() -> list[list[Tokens]]:
            of_episode = [parts.get(split_id(i)[1]) for i in seen.episode_ids]
            return [self._context.read_tokens(part) if part is not None else [] for part in of_episode]

        try:
            return self._chains[name].on_group(seen, read_tokens), False
        except JournalError:
            return "damaged", False
        except DataflowError as error:
            accounts.fail_by(self._context, error)
            return "operator_failed", False


def _entries(
    group: OpenGroup, siblings: Sequence[int], result: Group, parts: Parts, added: Mapping[int, list[Added]]
) -> list[Entry]:
    """What is trained of a group that its operators let through: scored episodes with sampled tokens."""
    calls = result.call_advantages or [()] * len(result.rewards)
    advantages = result.advantages or [math.fsum(c) / max(len(c), 1) for c in calls]
    entries = []
    for k, reward, advantage, of_calls in zip(siblings, result.rewards, advantages, calls, strict=True):
        commit, part = group.results[k], parts.get(k)
        if reward is not None and commit is not None and part is not None and part.max_version >= 0:
            own = part.reward
            if own is None:  # an operator scored it
                own, part = reward, msgspec.structs.replace(part, reward=reward)
            success = success_of(commit, own)
            entries.append(Entry(part, advantage, success, of_calls, added.get(k, []), k))
    return entries


def as_group(name: str, group: OpenGroup, parts: Parts, context: Context) -> Group:
    """The group as operators see it; an episode without sampled tokens of this policy is unscored."""
    results = [(k, r) for k, r in enumerate(group.results) if r is not None]
    rows = [parts.get(k) for k, _ in results]
    return Group(
        group_id=group.group_id,
        policy=name,
        task=Task(group.source, group.row, group.epoch, context.fields(group.source, group.row)),
        episode_ids=[f"{group.group_id}/{k}" for k, _ in results],
        rewards=[p.reward if p is not None and p.max_version >= 0 else None for p in rows],
        rewards_per_call=[p.rewards_per_call if p is not None else () for p in rows],
        num_calls=[p.num_calls if p is not None else 0 for p in rows],
        metrics=[MappingProxyType(r.metrics) for _, r in results],
        num_tokens=[p.num_tokens if p is not None else 0 for p in rows],
        num_truncated=[p.num_truncated if p is not None else 0 for p in rows],
        min_version=[p.min_version if p is not None else -1 for p in rows],
        errors=[r.error for _, r in results],
    )
