"""What `[policies.<p>.batch]` and a policy's replay may ask for together."""

from __future__ import annotations

from astraflow.config.operators import operators_of_policy
from astraflow.config.rooms import CORRECTS_OFF_POLICY, ROOMS, WEIGHING_CORRECTIONS
from astraflow.config.schema import BatchSection, PolicySection, RunConfig


def serving_problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with how batches are made, one sentence each."""
    problems: list[str] = []
    for name, policy in config.trained.items():
        problems += _batch_problems(f"policies.{name}.batch", policy.batch)
        loss = policy.algorithm.loss.type
        lists = [{c.type for c in specs} for specs in policy.algorithm.all_corrections.values()]
        if loss in ROOMS["losses"] and set().union(*lists) <= set(ROOMS["corrections"]):  # others: when they are made
            corrected = loss in CORRECTS_OFF_POLICY or all(types & WEIGHING_CORRECTIONS for types in lists)
            problems += off_policy_problems(name, policy, corrected)
    return problems


def off_policy_problems(name: str, policy: PolicySection, corrected: bool) -> list[str]:
    """Replay of data older than `batch.max_staleness`, unless the loss corrects off-policy data."""
    loss, bound = policy.algorithm.loss.type, policy.batch.max_staleness
    if corrected:
        return []
    return [
        f"{item.where}.max_age={item.operator.max_age} must be <= policies.{name}.batch.max_staleness={bound} with "
        f"policies.{name}.algorithm.loss={loss!r}, which does not correct off-policy data; use a loss that does "
        f"({', '.join(sorted(CORRECTS_OFF_POLICY))}) or algorithm.corrections that weigh "
        f"({', '.join(sorted(WEIGHING_CORRECTIONS))}), or leave max_age out"
        for item in operators_of_policy(name, policy).listed
        if item.operator.max_age is not None and item.operator.max_age > bound
    ]


def _batch_problems(where: str, batch: BatchSection) -> list[str]:
    if not batch.episodes:
        return []
    problems = []
    if batch.tokens:
        problems.append(
            f"{where}.tokens={batch.tokens} cannot be with {where}.episodes={batch.episodes}: a batch is so many "
            "episodes or closes at so many tokens; leave one of them out"
        )
    if batch.groups != BatchSection().groups:
        problems.append(
            f"{where}.groups={batch.groups} has no effect with {where}.episodes={batch.episodes}; leave it out"
        )
    return problems
