"""The part of a run file that the machine goes by, and the context that its parts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from astraflow.config.schema import MixSection, PolicySection, RunConfig
from astraflow.contracts import Source
from astraflow.dataflow.machine.commands import Instruction
from astraflow.dataflow.machine.records import Part, Put, State
from astraflow.dataflow.machine.serving.waiting import Waiting
from astraflow.errors import DataflowError, Problem, SourceError
from astraflow.types import Purpose, Sampling, Tokens


class PolicyPlan(msgspec.Struct, frozen=True):
    """What the machine needs of one `[policies.<name>]`."""

    groups: int
    max_staleness: int
    max_dropped_groups: int
    sampling: dict[Purpose, Sampling]
    order: Literal["edf", "fifo"] = "edf"
    tokens: int = 0  # a batch is full at this many sampled tokens too; 0: by groups only
    episodes: int = 0  # of a batch; 0: whole groups
    group_size: int = 1  # largest of the training sources
    steps: int = 0  # that it makes
    start: int = 0  # steps of the others before it is trained


class ServedPlan(msgspec.Struct, frozen=True):
    """What the machine needs of a policy that is only served."""

    sampling: dict[Purpose, Sampling]
    copy_of: str = ""  # policy whose versions its tokens are of; "": version 0 for good


class EvalPlan(msgspec.Struct, frozen=True):
    """[evaluation], with the number of tasks resolved."""

    source: str
    every: int
    num_tasks: int
    samples: int


class SourcePlan(msgspec.Struct, frozen=True):
    """What the machine needs of one training source."""

    num_rows: int
    group_size: int


class MixPlan(msgspec.Struct, frozen=True):
    """[mix], or the one training source at a ratio of 1."""

    ratios: dict[str, tuple[float, float]]  # source -> at the start, at the end; need not add up to 1
    schedule: Literal["linear", "cosine"]
    steps: int  # over which they move


class Plan(msgspec.Struct, frozen=True):
    """Constants of a run."""

    steps: int
    seed: int
    sources: dict[str, SourcePlan]  # training sources
    mix: MixPlan
    timeout_s: float
    max_attempts: int
    dead_after_s: float
    batch_lease_s: float
    policies: dict[str, PolicyPlan]  # those that are trained
    served: dict[str, ServedPlan]  # the others
    evaluation: EvalPlan | None

    def version_in(self, policy: str, round_: int) -> int:
        """The oldest version of a policy that may play in the evaluation round of this number."""
        return max(0, round_ - self.policies[policy].start) if policy in self.policies else 0


_ROWS_KEPT = 256
ReadTokens = Callable[[Put, Sequence[int]], list[Tokens]]
"""Gives the tokens of these rows of a put."""


class Context:
    """What the parts of the machine work on together; `now` and `out` belong to the command being applied."""

    def __init__(
        self, plan: Plan, state: State, sources: Mapping[str, Source], read_tokens: ReadTokens | None = None
    ) -> None:
        self.plan, self.state, self.sources, self._read_tokens = plan, state, sources, read_tokens
        self.waiting = {name: Waiting(state.policies[name], p.order) for name, p in plan.policies.items()}
        self.now = 0.0
        self.out: list[Instruction] = []
        # Siblings ask for the same row: with eight of them a lease reads a source an eighth as often.
        self._row = lru_cache(_ROWS_KEPT)(lambda source, row: sources[source].row(row))

    def fields(self, source: str, row: int) -> dict[str, Any]:
        """The task's fields (a deterministic function of the row), for the caller to keep."""
        return dict(self._row(source, row))

    def read_tokens(self, part: Part) -> list[Tokens]:
        """Tokens of each branch of the part. Rows are never changed, so a replay reads what was read the first time.

        Raises: DataflowError: this machine was made without a reader. JournalError: the rows are damaged.
        """
        if self._read_tokens is None:
            raise DataflowError(
                "read_tokens", None, "is needed by an operator with needs_tokens", "give Machine a reader of rows"
            )
        return self._read_tokens(self.state.puts[part.put], part.rows)

    @property
    def all_resumed(self) -> bool:
        """Version 0 of every policy is published."""
        return all(p.latest >= 0 for p in self.state.policies.values())

    def finished_policy(self, policy: str) -> bool:
        """The policy has made all its steps."""
        return self.state.policies[policy].latest >= self.plan.policies[policy].steps

    def waits(self, policy: str) -> bool:
        """The policy is frozen until the others have made more steps."""
        start = self.plan.policies[policy].start
        if not start:
            return False
        others = (name for name, plan in self.plan.policies.items() if plan.start < start)
        return any(self.progress(name) < start for name in others)

    def takes_groups(self, policy: str) -> bool:
        """Groups that are admitted now are for this policy too."""
        return not self.finished_policy(policy) and not self.waits(policy)

    def progress(self, policy: str) -> int:
        """Where the policy stands between 0 and `run.steps`; -1: version 0 is not published."""
        latest = self.state.policies[policy].latest
        return latest + self.plan.policies[policy].start if latest >= 0 else -1

    @property
    def slowest(self) -> int:
        """`progress` of the slowest policy."""
        return min(map(self.progress, self.state.policies))

    @property
    def training_over(self) -> bool:
        """Every policy has made all its steps."""
        return all(map(self.finished_policy, self.state.policies))


def plan_of(config: RunConfig, sources: Mapping[str, Source]) -> Plan:
    """The plan of a run file, given its opened sources (the training source and that of [evaluation]).

    Raises: SourceError: a source has no rows. Problem: a setting asks for more than the sources have.
    """
    for name, source in sources.items():
        if len(source) < 1:
            raise SourceError(f"sources.{name}", len(source), "rows must be > 0", "name a source that has tasks")
    section = config.evaluation
    evaluation = None
    if section is not None:
        available = len(sources[section.source])
        if section.num_tasks > available:
            raise Problem(
                "evaluation.num_tasks", section.num_tasks, f"is more than sources.{section.source} has ({available})",
                "use 0 for all",
            )  # fmt: skip
        evaluation = EvalPlan(section.source, section.every, section.num_tasks or available, section.samples)
    largest = max(config.group_size(name) for name in config.train_sources)
    eval_temperature = section.temperature if section is not None else 0.0
    return Plan(
        steps=config.run.steps,
        seed=config.run.seed,
        sources={name: SourcePlan(len(sources[name]), config.group_size(name)) for name in config.train_sources},
        mix=_mix_plan(config),
        timeout_s=config.workflow.timeout_s,
        max_attempts=config.workflow.max_attempts,
        dead_after_s=config.dataflow.dead_after_s,
        batch_lease_s=config.dataflow.batch_lease_s,
        policies={
            name: _policy_plan(p, eval_temperature, largest, config.steps_of(name))
            for name, p in config.trained.items()
        },
        served={
            name: ServedPlan(_sampling(p, eval_temperature), p.copy_of.policy if p.copy_of is not None else "")
            for name, p in config.policies.items()
            if not p.trained
        },
        evaluation=evaluation,
    )


def _mix_plan(config: RunConfig) -> MixPlan:
    section = config.mix or MixSection(ratios=dict.fromkeys(config.train_sources, (1.0, 1.0)))
    return MixPlan(section.ratios, section.schedule, section.steps or config.run.steps)


def _sampling(policy: PolicySection, eval_temperature: float) -> dict[Purpose, Sampling]:
    s = policy.sampling
    train = Sampling(temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p, max_tokens=s.max_tokens)
    return {"train": train, "eval": msgspec.structs.replace(train, temperature=eval_temperature)}


def _policy_plan(policy: PolicySection, eval_temperature: float, max_group_size: int, steps: int) -> PolicyPlan:
    batch = policy.batch
    return PolicyPlan(
        groups=batch.groups,
        max_staleness=batch.max_staleness,
        max_dropped_groups=batch.max_dropped_groups,
        sampling=_sampling(policy, eval_temperature),
        order=batch.order,
        tokens=batch.tokens,
        episodes=batch.episodes,
        group_size=max_group_size,
        steps=steps,
        start=policy.frozen_steps,
    )
