"""A whole run on the simulated clock, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from astraflow.config.schema import NodeSection, RunConfig
from astraflow.errors import ConfigError
from astraflow.simulate.clock import Clock, Host, Line
from astraflow.simulate.dataflow import Dataflow, Trained
from astraflow.simulate.engine import shared_by
from astraflow.simulate.episodes import Episodes
from astraflow.simulate.node import Around, Node, Versions
from astraflow.simulate.profile import Profile
from astraflow.simulate.trainer import Barrier, StepLog, Trainer


@dataclass(frozen=True)
class Plan:
    """Beside run file and profile. `barrier`: the synchronous, trainer-centred loop instead of three services."""

    steps: int = 0  # 0: those of the run file
    num_nodes: int = 0  # the nodes of the run file, again and again; 0: as many as it has
    seed: int = 0
    barrier: bool = False


@dataclass(frozen=True)
class PolicyOutcome:
    """Means leave the first step out, where there are several."""

    steps: int
    step_s: float
    steps_done_s: float  # run time of the last acknowledgement
    busy_s: float  # of its trainer, a step
    trainer_idle: float
    staleness_mean: float
    staleness_max: int
    admitted: int  # groups: admitted = trained + dropped + in_flight
    trained: int
    dropped: dict[str, int]
    in_flight: int


@dataclass(frozen=True)
class Prediction:
    """Idle shares and bytes are of the time from the first step of every policy to the last step of all."""

    policies: dict[str, PolicyOutcome]
    wall_s: float
    trainer_idle: float  # of all trainers together
    node_idle: float  # mean over nodes of the share of time in which their engines did not compute
    tokens_per_s: float
    bytes_per_step: float  # both directions; steps of all policies together
    weight_bytes_per_step: float
    messages_per_step: float
    episodes_per_step: float
    s_per_episode: float
    engine_s_per_episode: float  # busy seconds, mean over the engines of a node, summed over nodes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Mark:
    at_s: float
    busy_s: list[float]
    tokens: int
    num_bytes: float
    weight_bytes: float
    messages: int
    steps: int
    episodes: int


def simulate(config: RunConfig, profile: Profile, plan: Plan = Plan()) -> Prediction:
    """Play the run of `config`. Raises: Problem: it comes to no step. ConfigError: placement is not simulated."""
    if problems := _placement_problems(config):
        raise ConfigError("simulate", problems)
    return _World(config, profile, plan).play()


class _World:
    def __init__(self, config: RunConfig, profile: Profile, plan: Plan) -> None:
        self._clock = Clock()
        self._shared = Host(self._clock, profile.serving.cores) if profile.serving.cores else None
        seed, size = plan.seed, config.group_size(config.train_sources[0])
        trained = {name: _trained(config, profile, plan, name, size) for name in config.trained}
        self._dataflow = Dataflow(self._clock, trained, size, seed, plan.barrier)
        versions = Versions(self._clock, trained)
        most = {name: policy.sampling.max_tokens for name, policy in config.policies.items()}
        network = profile.network
        self._around = Around(
            self._clock, profile, self._dataflow, versions, Episodes(profile.episode, most, size, seed),
            Line(self._clock, network.mbit), Line(self._clock, network.mbit),
        )  # fmt: skip
        self._trainers = [
            Trainer(self._dataflow, versions, name, profile.cost(name), _row_tokens(profile, name), self._host())
            for name in trained
        ]  # fmt: skip
        self._nodes = []
        for section in _nodes(config, plan):
            node = Node(self._around, shared_by(config), section, self._host)
            self._nodes.append(node)
            self._clock.after(profile.serving.start_s + section.start_after_s, _joining(node, config))
        self._start_s = profile.serving.start_s
        if plan.barrier:
            Barrier(self._dataflow, self._trainers)

    def _host(self) -> Host:
        return self._shared or Host(self._clock)

    def play(self) -> Prediction:
        for trainer in self._trainers:
            self._clock.after(self._start_s, trainer.begin)
        self._clock.run(lambda: all(trainer.steps for trainer in self._trainers))
        first = self._mark()
        self._clock.run(lambda: self._dataflow.over)
        last = self._mark()
        if last.at_s == first.at_s:  # one step
            first = _Mark(self._start_s, [0.0] * len(self._nodes), 0, 0.0, 0.0, 0, 0, 0)
        return self._prediction(first, last)

    def _mark(self) -> _Mark:
        engines = [engine for node in self._nodes for engine in node.own_engines.values()]
        up, down = self._around.up, self._around.down
        return _Mark(
            self._clock.now, [node.busy_s() for node in self._nodes], sum(engine.num_tokens for engine in engines),
            up.num_bytes + down.num_bytes, sum(node.weight_bytes for node in self._nodes),
            up.num_messages + down.num_messages, sum(len(trainer.steps) for trainer in self._trainers),
            sum(node.num_played for node in self._nodes),
        )  # fmt: skip

    def _prediction(self, first: _Mark, last: _Mark) -> Prediction:
        wall_s, steps = last.at_s - first.at_s, max(1, last.steps - first.steps)
        counted = [step for trainer in self._trainers for step in _counted(trainer.steps)]
        busy = [(b - a) / wall_s if wall_s else 0.0 for a, b in zip(first.busy_s, last.busy_s, strict=True)]
        return Prediction(
            policies={trainer.name: self._outcome(trainer) for trainer in self._trainers},
            wall_s=last.at_s,
            trainer_idle=_idle(counted),
            node_idle=1.0 - sum(busy) / len(busy),
            tokens_per_s=(last.tokens - first.tokens) / wall_s if wall_s else math.inf,
            bytes_per_step=(last.num_bytes - first.num_bytes) / steps,
            weight_bytes_per_step=(last.weight_bytes - first.weight_bytes) / steps,
            messages_per_step=(last.messages - first.messages) / steps,
            episodes_per_step=(last.episodes - first.episodes) / steps,
            s_per_episode=wall_s / max(1, last.episodes - first.episodes),
            engine_s_per_episode=wall_s * sum(busy) / max(1, last.episodes - first.episodes),
        )

    def _outcome(self, trainer: Trainer) -> PolicyOutcome:
        steps, counted = trainer.steps, _counted(trainer.steps)
        policy = self._dataflow.policies[trainer.name]
        staleness = [value for step in counted for value in step.staleness]
        begun_s = steps[0].at_s if len(steps) > 1 else self._start_s
        return PolicyOutcome(
            steps=len(steps), step_s=(steps[-1].at_s - begun_s) / len(counted), steps_done_s=steps[-1].at_s,
            busy_s=sum(step.busy_s for step in counted) / len(counted), trainer_idle=_idle(counted),
            staleness_mean=sum(staleness) / len(staleness), staleness_max=max(staleness),
            admitted=policy.admitted, trained=policy.trained, dropped=dict(policy.dropped), in_flight=policy.in_flight,
        )  # fmt: skip


def _trained(config: RunConfig, profile: Profile, plan: Plan, name: str, group_size: int) -> Trained:
    batch = config.policies[name].batch
    groups = batch.groups
    if batch.episodes:
        groups = math.ceil(batch.episodes / group_size)
    elif batch.tokens:
        groups = min(groups, math.ceil(batch.tokens / (group_size * max(1.0, _row_tokens(profile, name)))))
    steps = min(plan.steps, config.steps_of(name)) if plan.steps else config.steps_of(name)
    cost = profile.cost(name)
    staleness = 0 if plan.barrier else batch.max_staleness
    return Trained(cost.groups or groups, staleness, steps, cost.kept, batch.max_dropped_groups)


def _row_tokens(profile: Profile, name: str) -> float:
    """Sampled by a policy in an episode that calls it, on average."""
    shape = profile.episode
    return shape.rounds * sum(call.tokens * call.chance for call in shape.calls if call.policy == name)


def _nodes(config: RunConfig, plan: Plan) -> list[NodeSection]:
    sections = config.rollout.nodes
    return [sections[i % len(sections)] for i in range(plan.num_nodes or len(sections))]


def _placement_problems(config: RunConfig) -> list[str]:
    return [
        f"rollout.nodes.{place}.serves={node.serves} is not simulated, where every node has engines for all policies; "
        "list all policies, or none, and give the engines' costs as if they were on one node"
        for place, node in enumerate(config.rollout.nodes)
        if node.serves and set(node.serves) != set(config.policies)
    ]


def _joining(node: Node, config: RunConfig) -> Any:
    return lambda: node.join(config.dataflow.heartbeat_s)


def _counted(steps: Sequence[StepLog]) -> Sequence[StepLog]:
    return steps[1:] if len(steps) > 1 else steps


def _idle(steps: Sequence[StepLog]) -> float:
    waited, busy = sum(step.wait_s for step in steps), sum(step.busy_s for step in steps)
    return waited / (waited + busy) if waited + busy else 0.0
