"""What a trainer of several ranks, or of several policies, cannot do."""

from __future__ import annotations

from astraflow.config.schema import PolicySection, RunConfig


def rank_problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with trainers of several ranks or policies, one sentence each."""
    together = [problem for policies in config.trainers.values() for problem in _together(policies, config)]
    return together + [
        problem
        for name, policy in config.trained.items()
        if policy.trainer.ranks > 1 or policy.trainer.tensor_parallel * policy.trainer.context_parallel > 1
        for problem in _problems(f"policies.{name}", policy)
    ]


def _together(policies: list[str], config: RunConfig) -> list[str]:
    problems, first = [], policies[0]
    for name in policies if len(policies) > 1 else ():
        trainer = config.policies[name].trainer
        where = f"policies.{name}.trainer"
        if trainer.ranks > 1:
            problems.append(
                f"{where}.ranks={trainer.ranks} cannot be with {where}.process={trainer.process!r}, where several "
                "policies are trained in turn; use one rank, or a process of its own"
            )
        if trainer.threads != config.policies[first].trainer.threads:
            problems.append(
                f"{where}.threads={trainer.threads} must be that of policies.{first}, "
                f"{config.policies[first].trainer.threads}, which is trained by the same process; write the same"
            )
    return problems


def _problems(where: str, policy: PolicySection) -> list[str]:
    problems, trainer = [], policy.trainer
    ranks, team = f"{where}.trainer.ranks={trainer.ranks}", trainer.tensor_parallel * trainer.context_parallel
    if trainer.ranks % team:
        problems.append(
            f"{ranks} must be a multiple of trainer.tensor_parallel={trainer.tensor_parallel} times "
            f"trainer.context_parallel={trainer.context_parallel}; use {-(-trainer.ranks // team) * team}, or lower one"
        )
    if policy.lora is not None and trainer.tensor_parallel > 1:
        problems.append(
            f"{where}.trainer.tensor_parallel={trainer.tensor_parallel} cannot be with {where}.lora, whose matrices "
            "are not cut; use trainer.context_parallel, or more ranks with tensor_parallel = 1"
        )
    if policy.lora is not None and policy.lora.quantize != "none" and trainer.ranks > 1:
        problems.append(
            f"{ranks} cannot be with {where}.lora.quantize={policy.lora.quantize!r}, whose packed weights are not "
            "divided; use one rank, or quantize = 'none'"
        )
    if policy.optimizer.type == "adamw_8bit" and trainer.tensor_parallel > 1:
        problems.append(
            f"{where}.trainer.tensor_parallel={trainer.tensor_parallel} cannot be with {where}.optimizer.type="
            "'adamw_8bit', whose blocks are cut by other parts than rows; use adamw, or tensor_parallel = 1"
        )
    return problems
