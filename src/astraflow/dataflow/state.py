"""The dataflow machine: a pure function of its commands. No I/O, no clock, no randomness, no asyncio.

| command        | from    | does                                                                     |
|----------------|---------|--------------------------------------------------------------------------|
| JoinNode       | node    | enters the pool                                                          |
| LeaseEpisodes  | node    | offers lost episodes again, admits new groups through the staleness gate |
| ReturnEpisodes | node    | gives some of its leases back                                            |
| CommitEpisodes | node    | completes episodes and groups; operators decide what is queued           |
| DrainNode      | node    | gives its leases back                                                    |
| ResumePolicy   | trainer | starts at a version; later batches will be served again                  |
| TakeBatch      | trainer | forms the batch of the next step, oldest groups first                    |
| AckBatch       | trainer | the step is trained, its slots are free                                  |
| CoverBatches   | trainer | a checkpoint is on disk, older batches are forgotten                     |
| LeaseRows      | stage   | gives entries that wait for the stage, oldest weight version first       |
| AddColumns     | stage   | completes entries; groups with all their columns go on                   |
| LeaveStage     | stage   | gives a worker's leases back                                             |
| AckRows        | consumer| is done with groups of the log                                           |
| Expire         | clock   | leases, nodes and trainers that ran out of time (`due` says which)       |
| DropDamaged    | shell   | groups with rows that turned out to be damaged                           |
| Reopen         | shell   | the service started again                                                |
| FailRun        | shell   | ends the run: an operator's state cannot be written                      |
| VoidCommand    | shell   | counts a command that raised, see `dataflow.rebuild`                     |

`apply(command, now)` gives the reply and instructions for the shell, or raises `Refusal` with the state unchanged.
After anything else that it raises the machine is spoiled: it is thrown away, and the command is void.
Accounting law, at all times and for every policy: `admitted = trained + dropped{reason} + in_flight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from astraflow.config.schema import RunConfig
from astraflow.config.stages import stage_plans
from astraflow.contracts import Source
from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.admission.gate import Admission
from astraflow.dataflow.machine.evaluation import Evaluation
from astraflow.dataflow.machine.leases import Leases
from astraflow.dataflow.machine.liveness import Liveness
from astraflow.dataflow.machine.plan import Context, ReadTokens, plan_of
from astraflow.dataflow.machine.queues import Queues
from astraflow.dataflow.machine.readers.consumers import Consumers
from astraflow.dataflow.machine.readers.consumers import topic as consumer_topic
from astraflow.dataflow.machine.readers.stages import Stages
from astraflow.dataflow.machine.readers.stages import topic as stage_topic
from astraflow.dataflow.machine.records import PolicyState, State
from astraflow.dataflow.machine.routing import Routing
from astraflow.dataflow.machine.serving.balance import Balance
from astraflow.dataflow.operators.chain import chain_of
from astraflow.dataflow.operators.source.chain import source_chain_of
from astraflow.errors import DataflowError


class Applied(NamedTuple):
    """What one command led to."""

    reply: Any
    instructions: list[c.Instruction]


class Machine:
    """The machine of one run.

    Args: snapshot: state to start from; None: a fresh run. read_tokens: see `Context.read_tokens`.
    """

    def __init__(
        self,
        config: RunConfig,
        sources: Mapping[str, Source],
        snapshot: bytes | None = None,
        read_tokens: ReadTokens | None = None,
    ) -> None:
        if snapshot is None:
            self.state = State({name: PolicyState() for name in config.trained})
        else:
            self.state = msgspec.json.decode(snapshot, type=State)
        self.context = Context(plan_of(config, sources), self.state, sources, read_tokens)
        self._chains = {name: chain_of(name, p) for name, p in config.trained.items()}
        for name, chain in self._chains.items():
            chain.load_state_dicts(self.state.policies[name].operators)
        self.evaluation = Evaluation(self.context)
        self.queues = Queues(self.context, self._chains)
        self.stages = Stages(self.context, stage_plans(config), self.queues.too_late)
        self.consumers = Consumers(self.context, config.consumers, list(config.trained))
        source_chains = {name: source_chain_of(name, config.sources[name]) for name in config.train_sources}
        self.admission = Admission(self.context, source_chains, self.queues.ready, lambda: self.consumers.hold)
        self.routing = Routing(
            self.context, self._chains, self.admission, self.queues, self.evaluation, self.stages, self.consumers
        )
        self.leases = Leases(self.context, self.admission, self.evaluation, self.routing.complete)
        self.live = Liveness(self.context, self.stages.plans)
        self.balance = Balance(self.context)
        self._told = False  # whoever waits for rows knows that there will be no more

    def snapshot(self) -> bytes:
        """The whole state as JSON. Raises: DataflowError: a part of it cannot be written, and read again."""
        try:
            self.admission.keep_states()
            for name, chain in self._chains.items():
                self.state.policies[name].operators = chain.state_dicts()
            return _readable(msgspec.json.encode(self.state))
        finally:
            self.admission.forget_states()

    @property
    def finished(self) -> bool:
        """Every policy made its steps and every evaluation round is done."""
        return self.context.training_over and self.evaluation.done

    def due(self, now: float) -> c.Expire | None:
        """The command that time calls for; None: nothing ran out."""
        return self.live.due(now)

    def apply(self, command: c.Command, now: float) -> Applied:
        """Apply one command at run time `now`.

        Raises: Refusal: the command does not fit the state, which is unchanged.
        """
        context = self.context
        context.now, context.out = now, []
        reply = self._dispatch(command, now)
        if not isinstance(command, c.Reopen | c.VoidCommand):  # a start changes nothing of what was done before
            self.balance.look(now)
        if self.finished and not self._told:
            self._told = True
            names = [*map(stage_topic, self.stages.plans), *map(consumer_topic, self.state.policies)]
            context.out += map(c.Wake, names)
        return Applied(reply, context.out)

    def _dispatch(self, command: c.Command, now: float) -> Any:
        match command:
            case c.LeaseEpisodes():
                return self._lease(command, now)
            case c.CommitEpisodes():
                reply = self.leases.commit(command)
                if command.node_id in self.state.nodes:
                    self.live.hear_node(command.node_id, now)
                return reply
            case c.ReturnEpisodes():
                self.leases.returned(command)
            case c.JoinNode():
                self.leases.join(command.join)
                self.live.hear_node(command.join.node_id, now)
            case c.DrainNode():
                self.leases.leave(command.node_id, died=False)
            case c.LeaseRows() | c.AddColumns() | c.LeaveStage():
                return self._stage(command, now)
            case c.AckRows():
                self.consumers.ack(command)
            case c.Expire():
                self._expire(command)
            case c.DropDamaged():
                self.stages.drop_damaged(command.puts)
                self.queues.drop_damaged(command.puts)
                self.context.out.append(c.Event("alarm", {"damaged": command.where}))
            case c.Reopen():
                self._reopen(now)
            case c.FailRun():
                accounts.fail(self.context, command.failed)
            case c.VoidCommand():
                self.state.voids[command.kind] = self.state.voids.get(command.kind, 0) + 1
            case _:
                return self._trainer(command, now)
        return None

    def _trainer(self, command: c.ResumePolicy | c.TakeBatch | c.AckBatch | c.CoverBatches, now: float) -> Any:
        name = command.policy
        reply: Any = None
        match command:
            case c.ResumePolicy():
                reply = self.queues.resume(name, command.resume)
            case c.TakeBatch():
                reply = self.queues.take(name, command.trainer_id, command.version)
            case c.AckBatch():
                ack = command.ack
                self.queues.ack(name, ack.trainer_id, command.batch_id, ack.version, ack.metrics)
            case c.CoverBatches():
                self.queues.cover(name, command.checkpoint.trainer_id, command.checkpoint.version)
        if isinstance(command, c.AckBatch | c.ResumePolicy):
            self.stages.sweep(name)
        self.live.hear_trainer(name, now)
        self.evaluation.start_due()
        if self.context.training_over:
            self.leases.abandon_training()
        return reply

    def _stage(self, command: c.LeaseRows | c.AddColumns | c.LeaveStage, now: float) -> Any:
        stage, worker_id = command.stage, command.worker_id
        self.stages.plan(stage)
        reply: Any = None
        match command:
            case c.LeaseRows():
                reply = self.stages.lease(stage, worker_id, command.request_id, command.n)
                self.live.watch_rows(stage, reply, now)
            case c.AddColumns():
                reply, passed = self.stages.add(command)
                for group in passed:
                    self.routing.go_on(group)
            case c.LeaveStage():
                self.stages.leave(stage, worker_id, died=False)
                return None
        self.live.hear_worker(stage, worker_id, now)
        return reply

    def _lease(self, command: c.LeaseEpisodes, now: float) -> Any:
        leases = self.leases.lease(command.node_id, command.request_id, command.n)
        self.live.hear_node(command.node_id, now)
        self.live.watch([(x.episode_id, x.attempt) for x in leases], now)
        return leases

    def _expire(self, command: c.Expire) -> None:
        for node_id in command.nodes:
            self.leases.leave(node_id, died=True)
        if command.leases:
            self.leases.give_back(command.leases, lost=True)
        for stage, worker_id in command.workers:
            self.stages.leave(stage, worker_id, died=True)
        for stage, entry_id, attempt in command.rows:
            self.stages.take_back(stage, entry_id, attempt)
        for name in command.trainers:
            if (seen := self.live.trainers.get(name)) is not None:
                seen.silent = True
            for batch in self.state.policies[name].batches.values():
                batch.holder = ""
            limit = self.context.plan.batch_lease_s
            self.context.out.append(c.Event("trainer_silent", {"policy": name, "batch_lease_s": limit}))

    def _reopen(self, now: float) -> None:
        state = self.state
        if state.failure is not None:
            state.failure = None
            self.admission.reopen()
            for policy in state.policies.values():
                policy.dropped_in_row = policy.failed_in_row = 0
        self.evaluation.reopen()
        self.live.restart(now)


def _readable(snapshot: bytes) -> bytes:
    """A number that is not finite would become null, and be found by the next start when it is too late."""
    try:
        msgspec.json.decode(snapshot, type=State)
    except msgspec.ValidationError as error:
        raise DataflowError(
            "dataflow.state", str(error), "cannot be read again from a snapshot", "report this with the run directory"
        ) from error
    return snapshot
