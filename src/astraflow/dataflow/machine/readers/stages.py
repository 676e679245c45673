"""Groups that wait for stages: which worker has which entry, what it added, and when the group may go on.

```
 complete ─► closed ──(stages that add "reward", and those they need)──► operators ─► queued ──(other stages)──► queue
               │                                                                        │
               └── stale, finished, or an entry whose attempts ran out: dropped{reason} ┘

 an entry:  pending ─lease─► held(worker, attempt) ─columns─► done ─(its last stage)─► the group goes on when all did
               ▲                  │ worker silent, columns refused, worker failed
               └──────────────────┘ attempt + 1 is offered; after max_attempts losses the group is dropped
```

The unit of work is an entry: all rows of one episode of one policy, so that a fork is never without its prefix. A stage
is offered an entry when the stages whose columns it needs are done with it. Oldest weight version first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from astraflow.config.stages import StagePlan
from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine.commands import AddColumns, EntryColumns, Event, Refusal, Wake
from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import (
    Added,
    OpenGroup,
    Part,
    QueuedGroup,
    StagedEntry,
    StagedGroup,
    StageState,
    StageWorker,
    split_id,
)

_PROBLEM_CHARS = 300
_SILENT = "a worker fell silent while it held rows; see its log, or raise lease_s"
_HANGS = "a worker kept rows for ten times lease_s; see its log, raise lease_s or lower rows"


def topic(stage: str) -> str:
    """What requests for rows of a stage wait for."""
    return f"stages/{stage}"


class Passed(NamedTuple):
    """A group whose stages are done, and what they added before the operators saw it."""

    group: StagedGroup
    parts: dict[int, Part]  # of `group.closed`
    added: dict[int, list[Added]]


class Stages:
    """All stages of a run."""

    def __init__(
        self, context: Context, plans: Mapping[str, StagePlan], too_late: Callable[[str, int], str | None]
    ) -> None:
        """`too_late(policy, oldest version)`: why such a group cannot be trained any more; None: it can."""
        self._context, self.plans, self._too_late = context, plans, too_late
        self._early: dict[str, list[str]] = {}  # policy -> stages before its operators, in order
        self._late: dict[str, list[str]] = {}
        for name in _in_order(plans):
            for policy in plans[name].policies:
                (self._early if plans[name].before_operators else self._late).setdefault(policy, []).append(name)
        for name in plans:
            context.state.stages.setdefault(name, StageState())

    def hold_closed(self, policy: str, group: OpenGroup, parts: Mapping[int, Part]) -> bool:
        """A group before the operators; False: no stage wants to see it."""
        left = self._early.get(policy)
        if not left:
            return False
        played = {k: part for k, part in parts.items() if part.max_version >= 0}
        if not played or self._too_late(policy, _oldest(played.values())) is not None:
            return False
        own = [[parts[k]] if k in parts else [] for k in range(len(group.results))]
        results = [r and msgspec.structs.replace(r, parts=p) for r, p in zip(group.results, own, strict=True)]
        closed = msgspec.structs.replace(group, results=results)
        entries = {k: StagedEntry(part, list(left)) for k, part in played.items()}
        self._hold(policy, group.group_id, entries, closed=closed)
        return True

    def hold_queued(self, policy: str, group: QueuedGroup) -> bool:
        """A group that its operators let through; False: no stage wants to see it."""
        left = self._late.get(policy)
        if not left or self._too_late(policy, group.min_version) is not None:
            return False
        entries = {e.sibling: StagedEntry(e.part, list(left), list(e.added)) for e in group.entries}
        self._hold(policy, group.group_id, entries, queued=group)
        return True

    def _hold(
        self,
        policy: str,
        group_id: str,
        entries: dict[int, StagedEntry],
        closed: OpenGroup | None = None,
        queued: QueuedGroup | None = None,
    ) -> None:
        state = self._context.state
        oldest = _oldest(e.part for e in entries.values())
        group = StagedGroup(policy, group_id, state.num_staged, oldest, entries, closed, queued)
        state.num_staged += 1
        state.staged[f"{policy}/{group_id}"] = group
        for k, entry in entries.items():
            for stage in entry.left:
                self._offer_if_ready(stage, group, k)

    def _offer_if_ready(self, stage: str, group: StagedGroup, k: int) -> None:
        entry = group.entries[k]
        if stage in entry.left and not any(other in entry.left for other in self.plans[stage].after):
            pending = self._context.state.stages[stage].pending
            heapq.heappush(pending, (group.min_version, group.seq, f"{group.policy}/{group.group_id}/{k}"))
            self._context.out.append(Wake(topic(stage)))

    def plan(self, stage: str) -> StagePlan:
        """The plan of a stage, or 404."""
        if stage not in self.plans:
            known = ", ".join(self.plans) or "none"
            raise Refusal(404, f"stage={stage} is not a stage of this run; known: {known}", reason="unknown_stage")
        return self.plans[stage]

    def held(self, stage: str, worker_id: str, entry_id: str, attempt: int) -> StagedEntry | None:
        """The entry, when this worker holds this attempt of it."""
        worker = self._context.state.stages[stage].workers.get(worker_id)
        if worker is None or worker.held.get(entry_id) != attempt:
            return None
        return self._find(entry_id)[1]

    def lease(self, stage: str, worker_id: str, request_id: str, n: int) -> list[tuple[str, int]]:
        """Entries with about `n` rows; a repeated request gets those of its first time that the worker still holds."""
        plan, state = self.plan(stage), self._context.state.stages[stage]
        worker = state.workers.get(worker_id) or StageWorker()
        if request_id == worker.last_lease:
            return [(e, worker.held[e]) for e in worker.last_given if e in worker.held]
        room, given = min(n, plan.rows), list[str]()
        while state.pending and room > 0:
            entry_id = state.pending[0][2]
            _, entry = self._find(entry_id)
            if given and len(entry.part.rows) > room:
                break
            heapq.heappop(state.pending)
            room -= len(entry.part.rows)
            entry.attempts[stage] = worker.held[entry_id] = entry.attempts.get(stage, 0) + 1
            entry.holders[stage] = worker_id
            given.append(entry_id)
        if given:
            worker.last_lease, worker.last_given = request_id, given
            state.workers[worker_id] = worker
        return [(e, worker.held[e]) for e in given]

    def add(self, command: AddColumns) -> tuple[dict[str, str], list[Passed]]:
        """Per entry "accepted", or "refused: <why>"; and the groups that may go on."""
        stage = command.stage
        self.plan(stage)
        state = self._context.state.stages[stage]
        worker = state.workers.get(command.worker_id)
        if worker is not None and command.request_id == worker.last_push:
            return worker.last_results, []
        results, good = dict[str, str](), list[EntryColumns]()
        for given in command.entries:
            if given.entry_id in results:
                continue
            why = self._late_because(stage, command.worker_id, given)
            results[given.entry_id] = f"refused: {why}" if why else "accepted"
            if not why and not given.problem:
                good.append(given)
            elif why:
                state.refused["late"] = state.refused.get("late", 0) + 1
        if command.put is not None:
            accounts.hold(self._context, command.put, len(good))
        done = [self._take(stage, given, command.put.key if command.put else 0) for given in good]
        bad = [x for x in command.entries if x.problem and results[x.entry_id] == "accepted" and x not in good]
        results |= {x.entry_id: "refused: " + x.problem.partition(": ")[2] for x in bad}
        self._refuse(stage, bad)
        if worker is not None:
            worker.last_push, worker.last_results = command.request_id, results
        passed = [self._pass(key) for key in dict.fromkeys(done) if self._is_through(key)]
        return results, passed

    def _take(self, stage: str, given: EntryColumns, put: int) -> str:
        """Good columns of a held entry; gives the key of its group."""
        group, entry = self._find(given.entry_id)
        self._let_go(stage, given.entry_id, entry)
        entry.left.remove(stage)
        entry.attempts.pop(stage, None)
        entry.losses.pop(stage, None)
        entry.added = [*entry.added, Added(stage, put, given.rows)]
        if "reward" in self.plans[stage].adds:
            entry.part = msgspec.structs.replace(entry.part, reward=given.reward)
        self._context.state.stages[stage].num_done += 1
        for other in entry.left:
            if stage in self.plans[other].after:
                self._offer_if_ready(other, group, split_id(given.entry_id)[1])
        return split_id(given.entry_id)[0]

    def _refuse(self, stage: str, bad: list[EntryColumns]) -> None:
        if not bad:
            return
        state = self._context.state.stages[stage]
        for given in bad:
            reason = given.problem.partition(":")[0]
            state.refused[reason] = state.refused.get(reason, 0) + 1
        first = state.last_problem = bad[0].problem.partition(": ")[2][:_PROBLEM_CHARS]
        self._context.out.append(Event("stage_refused", {"stage": stage, "entries": len(bad), "first": first}))
        self.give_back(stage, [(x.entry_id, x.attempt) for x in bad], lost=True)

    def _is_through(self, key: str) -> bool:
        group = self._context.state.staged.get(key)
        return group is not None and not any(entry.left for entry in group.entries.values())

    def _pass(self, key: str) -> Passed:
        group = self._context.state.staged.pop(key)
        parts = {}
        if group.closed is not None:
            parts = {k: p for k, r in enumerate(group.closed.results) if r is not None for p in r.parts}
        parts |= {k: entry.part for k, entry in group.entries.items()}
        added = {k: entry.added for k, entry in group.entries.items()}
        if group.queued is not None:
            entries = [msgspec.structs.replace(e, added=added[e.sibling]) for e in group.queued.entries]
            group.queued = msgspec.structs.replace(group.queued, entries=entries)
        return Passed(group, parts, added)

    def leave(self, stage: str, worker_id: str, *, died: bool) -> None:
        """A worker is gone; what it held is offered again."""
        worker = self._context.state.stages[stage].workers.get(worker_id) if stage in self.plans else None
        if worker is None:
            return
        if died and worker.held:
            self._context.state.stages[stage].last_problem = _SILENT
            fields = {"stage": stage, "worker_id": worker_id, "entries": len(worker.held)}
            self._context.out.append(Event("stage_worker_died", fields))
        self.give_back(stage, list(worker.held.items()), lost=died)
        del self._context.state.stages[stage].workers[worker_id]

    def take_back(self, stage: str, entry_id: str, attempt: int) -> None:
        """A worker that lives has kept an entry for too long."""
        if stage in self.plans:
            self._context.state.stages[stage].last_problem = _HANGS
        self.give_back(stage, [(entry_id, attempt)], lost=True)

    def give_back(self, stage: str, leases: Iterable[tuple[str, int]], *, lost: bool) -> None:
        """Offer these attempts again; `lost` counts towards `max_attempts`. Others than current are ignored."""
        if stage not in self.plans:
            return
        state, worn_out = self._context.state.stages[stage], set[str]()
        for entry_id, attempt in leases:
            group, entry = self._find_or_none(entry_id)
            if group is None or entry is None or entry.attempts.get(stage) != attempt or stage not in entry.holders:
                continue
            self._let_go(stage, entry_id, entry)
            state.num_lost += lost
            entry.losses[stage] = entry.losses.get(stage, 0) + lost
            self._offer_if_ready(stage, group, split_id(entry_id)[1])
            if entry.losses[stage] >= self.plans[stage].max_attempts:
                worn_out.add(f"{group.policy}/{group.group_id}")
        self._drop(worn_out, lambda group: f"stage_{stage}")

    def sweep(self, policy: str) -> None:
        """The policy made a step: groups that cannot be trained any more are dropped."""
        staged = self._context.state.staged
        found = {
            key: reason
            for key, g in staged.items()
            if g.policy == policy and (reason := self._too_late(policy, g.min_version)) is not None
        }
        self._drop(found, lambda group: found[f"{group.policy}/{group.group_id}"])

    def drop_damaged(self, keys: Collection[int]) -> None:
        """Rows in these puts are damaged: groups that need them are dropped."""
        found = [
            key
            for key, group in self._context.state.staged.items()
            if any(e.part.put in keys or any(a.put in keys for a in e.added) for e in group.entries.values())
        ]
        self._drop(found, lambda group: "damaged")

    def _drop(self, keys: Collection[str], reason: Callable[[StagedGroup], str]) -> None:
        if not keys:
            return
        state = self._context.state
        for stage in state.stages.values():
            stage.pending = [x for x in stage.pending if split_id(x[2])[0] not in keys]
            heapq.heapify(stage.pending)
        for key in keys:
            group = state.staged.pop(key)
            for k, entry in group.entries.items():
                for stage_name in list(entry.holders):
                    self._let_go(stage_name, f"{key}/{k}", entry)
                accounts.release(self._context, entry.added)
            if group.closed is not None:
                results = (r for r in group.closed.results if r is not None)
                accounts.release(self._context, (part for r in results for part in r.parts))
            else:
                accounts.release(self._context, (entry.part for entry in group.entries.values()))
            accounts.settle_dropped(self._context, group.policy, group.group_id, reason(group))

    def _late_because(self, stage: str, worker_id: str, given: EntryColumns) -> str:
        """Why these columns come too late; "": they do not."""
        _, entry = self._find_or_none(given.entry_id)
        attempt = given.attempt
        if entry is None:
            return f"entry {given.entry_id} does not wait for stages any more"
        if stage not in entry.left:
            return f"entry {given.entry_id} has the columns of stage {stage} already"
        current, holder = entry.attempts.get(stage, 0), entry.holders.get(stage)
        if attempt > current:
            return f"attempt {attempt} of {given.entry_id} was never leased"
        if holder is None:
            return f"attempt {attempt} of {given.entry_id} is over, attempt {current + 1} waits for a worker"
        if attempt < current:
            return f"attempt {attempt} of {given.entry_id} is over, attempt {current} is held by {holder}"
        return "" if holder == worker_id else f"attempt {attempt} of {given.entry_id} is held by {holder}"

    def _let_go(self, stage: str, entry_id: str, entry: StagedEntry) -> None:
        self._context.state.stages[stage].workers[entry.holders.pop(stage)].held.pop(entry_id, None)

    def _find(self, entry_id: str) -> tuple[StagedGroup, StagedEntry]:
        key, k = split_id(entry_id)
        group = self._context.state.staged[key]
        return group, group.entries[k]

    def _find_or_none(self, entry_id: str) -> tuple[StagedGroup, StagedEntry] | tuple[None, None]:
        key, k = split_id(entry_id)
        group = self._context.state.staged.get(key)
        return (None, None) if group is None or k not in group.entries else (group, group.entries[k])


def _oldest(parts: Iterable[Part]) -> int:
    return min(part.min_version for part in parts)


def _in_order(plans: Mapping[str, StagePlan]) -> list[str]:
    """Every stage after those whose columns it needs."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in order:
            for other in plans[name].after:
                visit(other)
            order[name] = None

    for name in plans:
        visit(name)
    return list(order)
