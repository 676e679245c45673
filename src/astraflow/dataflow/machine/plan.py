"""The part of a run file that the machine goes by, and the context that its parts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from astraflow.config.schema import PolicySection, RunConfig
from astraflow.contracts import Source
from astraflow.dataflow.machine.commands import Instruction
from astraflow.dataflow.machine.records import State
from astraflow.errors import DataflowError, SourceError
from astraflow.types import Purpose, Sampling


class PolicyPlan(msgspec.Struct, frozen=True):
    """What the machine needs of one `[policies.<name>]`."""

    groups: int
    max_staleness: int
    max_dropped_groups: int
    sampling: dict[Purpose, Sampling]


class EvalPlan(msgspec.Struct, frozen=True):
    """[evaluation], with the number of tasks resolved."""

    source: str
    every: int
    num_tasks: int
    samples: int


class Plan(msgspec.Struct, frozen=True):
    """Constants of a run."""

    steps: int
    seed: int
    train_source: str
    num_rows: int
    group_size: int
    timeout_s: float
    max_attempts: int
    dead_after_s: float
    batch_lease_s: float
    policies: dict[str, PolicyPlan]
    evaluation: EvalPlan | None


class Context:
    """What the parts of the machine work on together; `now` and `out` belong to the command being applied."""

    def __init__(self, plan: Plan, state: State, sources: Mapping[str, Source]) -> None:
        self.plan, self.state, self.sources = plan, state, sources
        self.now = 0.0
        self.out: list[Instruction] = []

    def fields(self, source: str, row: int) -> dict[str, Any]:
        """The task's fields (a deterministic function of the row)."""
        return self.sources[source].row(row)

    @property
    def all_resumed(self) -> bool:
        """Version 0 of every policy is published."""
        return all(p.latest >= 0 for p in self.state.policies.values())

    def finished_policy(self, policy: str) -> bool:
        """The policy has made all its steps."""
        return self.state.policies[policy].latest >= self.plan.steps

    @property
    def training_over(self) -> bool:
        """Every policy has made all its steps."""
        return all(p.latest >= self.plan.steps for p in self.state.policies.values())


def plan_of(config: RunConfig, sources: Mapping[str, Source]) -> Plan:
    """The plan of a run file, given its opened sources (the training source and that of [evaluation]).

    Raises: SourceError: a source has no rows.
    """
    for name, source in sources.items():
        if len(source) < 1:
            raise SourceError(f"sources.{name}", len(source), "rows must be > 0", "name a source that has tasks")
    section = config.evaluation
    evaluation = None
    if section is not None:
        available = len(sources[section.source])
        if section.num_tasks > available:
            raise DataflowError(
                "evaluation.num_tasks", section.num_tasks, f"is more than sources.{section.source} has ({available})",
                "use 0 for all",
            )  # fmt: skip
        evaluation = EvalPlan(section.source, section.every, section.num_tasks or available, section.samples)
    eval_temperature = section.temperature if section is not None else 0.0
    return Plan(
        steps=config.run.steps,
        seed=config.run.seed,
        train_source=config.train_source,
        num_rows=len(sources[config.train_source]),
        group_size=config.workflow.group_size,
        timeout_s=config.workflow.timeout_s,
        max_attempts=config.workflow.max_attempts,
        dead_after_s=config.dataflow.dead_after_s,
        batch_lease_s=config.dataflow.batch_lease_s,
        policies={name: _policy_plan(p, eval_temperature) for name, p in config.policies.items()},
        evaluation=evaluation,
    )


def _policy_plan(policy: PolicySection, eval_temperature: float) -> PolicyPlan:
    s = policy.sampling
    sampling = {
        purpose: Sampling(temperature=t, top_p=s.top_p, top_k=s.top_k, max_tokens=s.max_tokens)
        for purpose, t in (("train", s.temperature), ("eval", eval_temperature))
    }
    return PolicyPlan(policy.batch.groups, policy.batch.max_staleness, policy.batch.max_dropped_groups, sampling)  # type: ignore[arg-type]
