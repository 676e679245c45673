"""Which task is next, and whether it may start: the staleness gate, the mix of sources, their operators.

**The gate.** Let G be `batch.groups`, S `batch.max_staleness`, v the newest version and F the groups admitted and
neither trained nor dropped. A group is admitted while F < (S + 1) * G for every policy. A group admitted at version v
finds at most (S + 1) * G - 1 others in flight, so by the time those are trained, S further steps have been taken
and this group is in the next one: the trainer is then at most at v + S, hence staleness <= S as long as groups leave in
the order of their age. Groups that overtake break that argument, not the bound: the check at hand-out is hard.
Example: G = 16, S = 0: 16 groups are admitted, nothing more until their step is acknowledged: synchronous training.

Where a batch is not G fresh groups (`batch.tokens`, `batch.episodes`, replay), the gate is F < f + S * m: f are the
fresh groups of the batch that is being trained, or that the next one needs, and m is the mean of the last batches. The
argument holds as long as m moves slowly, and f keeps a trainer from waiting for groups that are never admitted
(`serving.pacing`).

Never more groups are admitted than the remaining steps need, so nothing is played for nothing at the end.

**Refusals.** A row that the operators refuse is counted and passed by. A source that says "wait", or whose operators
refused a whole epoch, sleeps until something happened (`State.news`) that may change their mind. When every source
sleeps and nothing is under way that could wake one, the run fails and names the operators: nothing waits forever.
"""

from __future__ import annotations

from collections.abc import Callable

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine.admission import mix
from astraflow.dataflow.machine.admission.rows import Rows, open_group
from astraflow.dataflow.machine.commands import Happened, Wake
from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import Failed, OpenGroup, SourceState
from astraflow.dataflow.machine.serving import pacing
from astraflow.dataflow.operators.source.chain import SourceChain, Verdict
from astraflow.errors import DataflowError
from astraflow.types import Group, SourceView, Task

ROWS_PER_COMMAND = 4096  # rows that one command looks at before it answers, so that no request waits long for another's
ROWS_PER_TURN = 1024  # rows of one source before the others of the mix get the turn
_EPOCHS_OF_CHANCE = 100
"""A row refused outright weighs this much, one refused by chance 1; a source is barren at this many times its rows.
So an epoch of certain refusals is enough, and bad luck alone is not."""


class Admission:
    """Opens groups from the training sources, in a seeded shuffle of each epoch; no source ever runs dry.

    Args: chains: operators by source. ready: whether a trainer of this policy at this version would get a batch.
    held: whether a consumer is so far behind that nothing may start.
    """

    def __init__(
        self,
        context: Context,
        chains: dict[str, SourceChain],
        ready: Callable[[str, int], bool],
        held: Callable[[], bool],
    ) -> None:
        self._context, self._chains, self._ready, self._held = context, chains, ready, held
        self._rows = {
            name: Rows(name, source.num_rows, context.plan.seed) for name, source in context.plan.sources.items()
        }
        self._budget = 0
        for name, chain in chains.items():
            chain.load_state_dicts(context.state.sources.setdefault(name, SourceState()).operators)

    def keep_states(self) -> None:
        """Write the states of operators into the state, for a snapshot."""
        for name, chain in self._chains.items():
            self._context.state.sources[name].operators = chain.state_dicts()

    def forget_states(self) -> None:
        """Undo `keep_states`: operators hold them already, and there may be an entry per row."""
        for source in self._context.state.sources.values():
            source.operators = []

    def reopen(self) -> None:
        """The service started again: every source is asked afresh."""
        for source in self._context.state.sources.values():
            source.asleep, source.barren = "", 0

    def limit(self, name: str) -> int:
        """Groups of policy `name` that may be in flight now."""
        return pacing.limit(self._context, name)

    @property
    def open(self) -> bool:
        """A further group may start, if the operators of a source that is awake let one through."""
        return self._gate_open and bool(self._able(self.shares()))

    @property
    def step(self) -> int:
        """Newest version of the slowest policy; 0 at the start."""
        return max(0, self._context.slowest)

    def shares(self) -> dict[str, float]:
        """Share of each training source now."""
        return mix.shares(self._context.plan.mix, self.step)

    def begin(self) -> None:
        """A command that may admit groups begins."""
        self._budget = ROWS_PER_COMMAND

    def next_group(self) -> OpenGroup | None:
        """Admit the next task; None: the gate is closed, or no source gave a task within the rows of this command."""
        if not self._gate_open:
            return None
        state, share = self._context.state, self.shares()
        while self._budget > 0:
            able = self._able(share)
            if not able:
                self._check_anything_moves(share)
                return None
            while able and self._budget > 0:
                name = mix.pick(state.sources, share, able)
                task = self._next_task(name)
                if task is not None:
                    mix.pay(state.sources, share, able, name)
                    return self._admit(task)
                if state.failure is not None:
                    return None
                able.remove(name)
        return None

    def on_result(self, group: Group) -> None:
        """A training group is complete for one policy: the operators of its source learn from it."""
        chain = self._chains.get(group.task.source)
        if not chain:
            return
        try:
            chain.on_result(group)
        except DataflowError as error:
            accounts.fail_by(self._context, error)
        state = self._context.state
        state.num_results += 1
        if any(source.asleep for source in state.sources.values()):
            self._context.out.append(Wake("leases"))

    @property
    def _gate_open(self) -> bool:
        context = self._context
        if not context.all_resumed or context.training_over or context.state.failure is not None or self._held():
            return False
        return all(
            policy.in_flight < self.limit(name)
            for name, policy in context.state.policies.items()
            if context.takes_groups(name)
        )

    def _able(self, share: dict[str, float]) -> list[str]:
        state = self._context.state
        news = state.news
        return [
            name for name, part in share.items()
            if part > 0 and (not state.sources[name].asleep or state.sources[name].seen != news)
        ]  # fmt: skip

    def _next_task(self, name: str) -> Task | None:
        """The next row of the source that its operators let through, with the cursor behind it."""
        context, rows, chain = self._context, self._rows[name], self._chains[name]
        source, news = context.state.sources[name], context.state.news
        if source.seen != news:
            source.seen, source.asleep, source.barren = news, "", 0
        view = SourceView(self.step, source.in_flight, source.admitted)
        for _ in range(min(self._budget, ROWS_PER_TURN)):
            self._budget -= 1
            row = rows.at(source.epoch, source.position)
            task = Task(name, row, source.epoch, context.fields(name, row))
            try:
                verdict = chain.admit(task, view, rows.draw(source.epoch, row)) if chain else Verdict("admit")
            except DataflowError as error:
                accounts.fail_by(self._context, error)
                return None
            if verdict.answer == "wait":
                source.asleep = verdict.operator
                return None
            source.position += 1
            if source.position == rows.num:
                source.epoch, source.position = source.epoch + 1, 0
            if verdict.answer == "admit":
                source.barren = 0
                return task
            context.out.append(Happened(task.group_id, "skipped", {"operator": verdict.operator}))
            source.skipped[verdict.operator] = source.skipped.get(verdict.operator, 0) + 1
            source.barren += _EPOCHS_OF_CHANCE if verdict.certain else 1
            if source.barren >= _EPOCHS_OF_CHANCE * rows.num:
                source.asleep = verdict.operator
                return None
        return None

    def _admit(self, task: Task) -> OpenGroup:
        size = self._context.plan.sources[task.source].group_size
        group = open_group(self._context, task.group_id, task, size, "train")
        accounts.admit(self._context, task.group_id, task.source)
        return group

    def _check_anything_moves(self, share: dict[str, float]) -> None:
        """Every source sleeps: the run fails unless something is under way."""
        context = self._context
        for name, policy in context.state.policies.items():
            if not context.takes_groups(name):
                continue
            if policy.in_flight > policy.num_waiting or self._ready(name, policy.latest):
                return
        asleep = {name: context.state.sources[name] for name, part in share.items() if part > 0}
        said, fixes = [], {}
        for name, source in asleep.items():
            waits = source.barren < _EPOCHS_OF_CHANCE * self._rows[name].num
            what = "waits" if waits else f"refused a whole epoch of {self._rows[name].num} tasks"
            counts = ", ".join(f"{operator} {count}" for operator, count in sorted(source.skipped.items()))
            said.append(f"sources.{name}: {source.asleep} {what}" + (f" (skipped so far: {counts})" if counts else ""))
            fixes[source.asleep] = self._chains[name].advice(source.asleep)
        thing = ", ".join(f"sources.{name}.operators" for name in asleep)
        value = ", ".join(dict.fromkeys(source.asleep for source in asleep.values()))
        rule = "let no task through and nothing is under way that could change that: " + "; ".join(said)
        fix = "; ".join(f"{operator}: {text}" for operator, text in fixes.items())
        accounts.fail(context, Failed("NothingToTrainOn", thing, value, rule, fix))
