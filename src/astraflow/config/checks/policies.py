"""Which policies are trained, and what those that are only served may say."""

from __future__ import annotations

from astraflow.config.schema import PolicySection, RunConfig

_OF_TRAINING = ("algorithm", "batch", "operators", "optimizer", "warm_start", "critic", "lora", "trainer")


def policy_problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with the policies as a whole, one sentence each."""
    if not config.policies:
        return ["policies={} must name at least one policy; add [policies.actor] with a model"]
    problems = _same_names(config)
    for name, policy in config.policies.items():
        problems += _problems_of(f"policies.{name}", policy, config)
    if not config.trained:
        problems.append(
            f"policies={', '.join(config.policies)} has nothing to train; leave out frozen or copy_of of at least one"
        )
    elif all(policy.frozen_steps for policy in config.trained.values()):
        problems.append(
            f"policies.{next(iter(config.trained))}.frozen_steps must be 0 for at least one policy that is trained: "
            "they would wait for each other; take it out there"
        )
    return problems


def _same_names(config: RunConfig) -> list[str]:
    """Names are those of directories, which some file systems do not tell apart by case."""
    first: dict[str, str] = {}
    problems = []
    for name in config.policies:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            problems.append(f"policies.{name} differs from policies.{other} by case only; give it another name")
    return problems


def _problems_of(where: str, policy: PolicySection, config: RunConfig) -> list[str]:
    if policy.trained:
        if not policy.sampling.temperature:
            return [
                f"{where}.sampling.temperature=0 must be greater than 0 in training: a policy that always says the "
                "likeliest learns nothing; use 1"
            ]
        if policy.frozen_steps >= config.run.steps:
            return [
                f"{where}.frozen_steps={policy.frozen_steps} must be below run.steps={config.run.steps}, or it is "
                "never trained; use frozen = true for that"
            ]
        return []
    problems, why = [], "frozen = true" if policy.frozen else "copy_of"
    if policy.frozen and policy.copy_of is not None:
        problems.append(f"{where}.frozen=true cannot be beside {where}.copy_of, whose weights change; leave one out")
    plain, given = PolicySection(model=policy.model).model_dump(), policy.model_dump()
    problems += [
        f"{where}.{name} has no effect with {where}.{why}: it is served and never trained; leave it out"
        for name in (*_OF_TRAINING, "frozen_steps")
        if given[name] != plain[name]
    ]
    return problems + _copy_problems(where, policy, config)


def _copy_problems(where: str, policy: PolicySection, config: RunConfig) -> list[str]:
    if policy.copy_of is None:
        return []
    of = policy.copy_of.policy
    if of not in config.trained:
        known = ", ".join(sorted(config.trained)) or "none"
        return [f"{where}.copy_of.policy={of!r} names no policy that is trained; known: {known}"]
    if config.policies[of].model != policy.model:
        return [
            f"{where}.model={policy.model!r} must be that of policies.{of}, {config.policies[of].model!r}, whose "
            "weights it gets; write the same"
        ]
    return []
