"""[stages] as a plan: what each stage reads and adds, on which policies, and what comes before what. Torch-free.

A stage that adds "reward", and every stage whose columns it needs, works before the operators of a policy; all others
work on the groups that the operators let through.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from astraflow.config.rooms import check_options, resolve
from astraflow.config.schema import RunConfig, StageSection
from astraflow.errors import Problem

Kind = Literal["token", "row", "reward"]
ROW_COLUMNS = (
    "episode_id", "attempt", "group_id", "source", "row", "epoch", "policy", "branch", "parent_branch", "fork_at",
    "token_ids", "loss_mask", "behavior_logprobs", "versions", "call_index", "reward", "rewards_per_call",
    "finish_reason", "truncated",
)  # fmt: skip
"""Columns of every row; a test holds them equal to `wire.codec.TRAJECTORY_SCHEMA`."""
TASK_COLUMN = "task"
"""The task's fields as JSON text; made by the worker from the header of its lease."""
REFERENCE_STAGE = "stage"
"""`algorithm.kl.reference` that asks for the column of a stage."""
_TAKEN = (*(c for c in ROW_COLUMNS if c != "reward"), TASK_COLUMN, "advantages", "weight", "engine")


@dataclass(frozen=True)
class StagePlan:
    """One stage as the dataflow service goes by it."""

    name: str
    needs: tuple[str, ...]
    adds: Mapping[str, Kind]
    policies: tuple[str, ...]
    rows: int
    lease_s: float
    max_attempts: int
    after: tuple[str, ...] = ()  # stages whose columns it needs
    before_operators: bool = False


def stage_plans(config: RunConfig) -> dict[str, StagePlan]:
    """The plan of every stage of a checked run file, by name."""
    return _linked({name: _plan(config, name, section) for name, section in config.stages.items()})


def stage_problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with [stages], one sentence each."""
    problems: list[str] = []
    for name, section in config.stages.items():
        where = f"stages.{name}"
        for policy in section.policies:
            if policy not in config.trained:
                known = ", ".join(sorted(config.trained))
                problems.append(f"{where}.policies={policy!r} names no policy that is trained; known policies: {known}")
        try:
            target = resolve("stages", section.type, f"{where}.type")
        except Problem as error:
            problems.append(str(error))
            continue
        problems += check_options(target, section.options, where, {"run"})
        problems += _contract_problems(target, where, section.type)
    if not problems:
        plans = {name: _plan(config, name, section) for name, section in config.stages.items()}
        problems += [*_twice(plans), *_unknown(plans), *_circles(plans), *reference_problems(config)]
    return problems


def reference_stage(config: RunConfig, policy: str) -> str | None:
    """The stage that adds `ref_logprobs` to rows of `policy`. Raises: Problem: a stage that cannot be imported."""
    for name, section in config.stages.items():
        if policy in (section.policies or config.trained) and "ref_logprobs" in _plan(config, name, section).adds:
            return name
    return None


def reference_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with the references and teachers of [policies.<p>.algorithm]; [stages] has no problems."""
    for name, policy in config.trained.items():
        kl, where = policy.algorithm.penalty, f"policies.{name}.algorithm"
        if kl is None:
            continue
        if kl.place == "loss" and kl.estimator == "k1":
            yield (
                f"{where}.kl.estimator='k1' has the same gradient in the loss whatever the reference is; use 'k2' or "
                f"'k3', or set {where}.kl.place to 'reward'"
            )
        stage, said = reference_stage(config, name), f"{where}.{policy.algorithm.reference_setting}={kl.reference!r}"
        if kl.reference == REFERENCE_STAGE and stage is None:
            otherwise = (
                "give a model: the trainer then scores it itself" if policy.algorithm.distill is not None
                else "leave it out: the trainer then scores version 0 itself"
            )  # fmt: skip
            yield (
                f"{said} needs a stage that adds 'ref_logprobs' to rows of {name!r}; "
                f"add [stages.ref] with type = 'ref_logprobs', or {otherwise}"
            )
        elif kl.reference not in ("", REFERENCE_STAGE) and stage is not None:
            yield (
                f"{said} cannot be beside stages.{stage}, which adds 'ref_logprobs' to "
                f"rows of {name!r}; leave one of them out, or give the model as stages.{stage}.model"
            )


def _plan(config: RunConfig, name: str, section: StageSection) -> StagePlan:
    target = resolve("stages", section.type, f"stages.{name}.type")
    return StagePlan(
        name=name,
        needs=tuple(target.needs),
        adds=dict(target.adds),
        policies=tuple(section.policies or config.trained),
        rows=section.rows,
        lease_s=section.lease_s,
        max_attempts=section.max_attempts,
    )


def _linked(plans: Mapping[str, StagePlan]) -> dict[str, StagePlan]:
    """With `after` and `before_operators` filled in."""
    makers = {column: name for name, plan in plans.items() for column in plan.adds if column != "reward"}
    after = {name: tuple(dict.fromkeys(_makers_of(plan, makers))) for name, plan in plans.items()}
    early: set[str] = set()
    todo = [name for name, plan in plans.items() if "reward" in plan.adds]
    while todo:
        name = todo.pop()
        if name not in early:
            early.add(name)
            todo += after[name]
    return {
        name: StagePlan(
            name, p.needs, p.adds, p.policies, p.rows, p.lease_s, p.max_attempts, after[name], name in early
        )
        for name, p in plans.items()
    }


def _makers_of(plan: StagePlan, makers: Mapping[str, str]) -> list[str]:
    return [makers[column] for column in plan.needs if column in makers and makers[column] != plan.name]


def _contract_problems(target: Any, where: str, type_name: str) -> Iterator[str]:
    try:
        needs, adds = tuple(target.needs), dict(target.adds)
    except (AttributeError, TypeError, ValueError):
        yield (
            f"{where}.type={type_name!r} must say which columns it needs and adds; give the class `needs` (a tuple of "
            "names) and `adds` (name -> 'token', 'row' or 'reward')"
        )
        return
    if not needs or not adds:
        yield f"{where}.type={type_name!r} must need and add at least one column; see docs/data-algorithms.md"
    for column, kind in adds.items():
        if kind not in get_args(Kind):
            yield f"{where}.adds.{column}={kind!r} must be one of {', '.join(get_args(Kind))}; say what it holds"
        elif column in _TAKEN:
            yield f"{where}.adds={column!r} is a column of every row; give the added one a name of its own"
        elif (column == "reward") != (kind == "reward"):
            yield f"{where}.adds.{column}={kind!r} does not fit; the column 'reward', and no other, holds a 'reward'"


def _twice(plans: Mapping[str, StagePlan]) -> Iterator[str]:
    makers: dict[str, str] = {}
    for name, plan in plans.items():
        for column in plan.adds:
            if (other := makers.setdefault(column, name)) != name:
                yield f"stages.{name}.adds={column!r} is added by stages.{other} already; leave one of the two out"


def _unknown(plans: Mapping[str, StagePlan]) -> Iterator[str]:
    makers = {column: plan for plan in plans.values() for column in plan.adds}
    known = [*ROW_COLUMNS, TASK_COLUMN, *(c for c in makers if c != "reward")]
    for name, plan in plans.items():
        for column in plan.needs:
            if column not in known:
                near = difflib.get_close_matches(column, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "add the stage that makes it"
                yield f"stages.{name}.needs={column!r} is no column of a row, and no stage adds it; {hint}"
            elif column in makers and column != "reward":
                lacking = sorted(set(plan.policies) - set(makers[column].policies))
                if lacking:
                    yield (
                        f"stages.{name}.needs={column!r} is not added for policy {lacking[0]!r}; "
                        f"add it to stages.{makers[column].name}.policies"
                    )


def _circles(plans: Mapping[str, StagePlan]) -> Iterator[str]:
    makers = {column: name for name, plan in plans.items() for column in plan.adds if column != "reward"}
    waiting = {name: {makers[c] for c in plan.needs if c in makers} for name, plan in plans.items()}
    while waiting:
        ready = [name for name, others in waiting.items() if not others & waiting.keys()]
        if not ready:
            names = ", ".join(sorted(waiting))
            yield f"stages={names} wait for each other's columns; take one of them out of the circle"
            return
        for name in ready:
            del waiting[name]


def consumer_problems(config: RunConfig) -> list[str]:
    """Consumers of policies that the run does not have."""
    known = ", ".join(sorted(config.trained))
    return [
        f"consumers.{name}.policies={policy!r} names no policy that is trained; known policies: {known}"
        for name, section in config.consumers.items()
        for policy in section.policies
        if policy not in config.trained
    ]
