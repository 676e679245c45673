"""Trainers: each in its own loop, or all of them in one, behind a barrier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from astraflow.simulate.clock import Host
from astraflow.simulate.dataflow import Dataflow
from astraflow.simulate.node import Versions
from astraflow.simulate.profile import PolicyCost


@dataclass
class StepLog:
    """One step. Seconds; staleness of each row."""

    at_s: float  # acknowledged
    wait_s: float
    busy_s: float
    staleness: list[int] = field(default_factory=list)


class Trainer:
    """One policy. `tokens`: sampled of a row, on average."""

    def __init__(
        self, dataflow: Dataflow, versions: Versions, name: str, cost: PolicyCost, tokens: float, host: Host
    ) -> None:
        self._clock, self._dataflow, self._versions, self.name = dataflow.clock, dataflow, versions, name
        self._cost, self._tokens, self._host = cost, tokens, host
        self.steps: list[StepLog] = []
        self._since = 0.0

    def begin(self) -> None:
        """From now on it trains whenever there is a batch."""
        policy = self._dataflow.policies[self.name]
        if policy.version < policy.steps:
            self._dataflow.ask_batch(self.name, lambda batch: self.train(batch, self.begin))

    def train(self, batch: list[list[int]], then: Callable[[], None]) -> None:
        """One step on the rows of a batch (their oldest versions, by group), then `then()`."""
        begun, version = self._clock.now, self._dataflow.policies[self.name].version
        staleness = [version - oldest for rows in batch for oldest in rows]
        cost = self._cost.trainer

        def trained() -> None:
            now = self._clock.now
            self.steps.append(StepLog(now, begun - self._since, now - begun, staleness))
            self._since = now
            self._versions.publish(self.name, self._cost.weights.publish_s)
            self._dataflow.acknowledge(self.name, len(batch))
            then()

        self._host.start(cost.step_s + len(staleness) * self._tokens * cost.token_s, trained)


class Barrier:
    """All trainers in one loop: they wait for the last episode of a round, then train one after the other."""

    def __init__(self, dataflow: Dataflow, trainers: list[Trainer]) -> None:
        self._dataflow, self._trainers = dataflow, trainers
        dataflow.on_round = lambda: self._train(0)

    def _train(self, index: int) -> None:
        if index == len(self._trainers):
            self._dataflow.next_round()
            return
        trainer = self._trainers[index]
        batch = self._dataflow.all_of(trainer.name)
        if batch:
            trainer.train(batch, lambda: self._train(index + 1))
        else:
            self._train(index + 1)
