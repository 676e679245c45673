"""What a trainer of several ranks cannot do."""

from __future__ import annotations

from astraflow.config.schema import PolicySection, RunConfig


def rank_problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with trainers of several ranks, one sentence each."""
    return [
        problem
        for name, policy in config.trained.items()
        if policy.trainer.ranks > 1 or policy.trainer.tensor_parallel * policy.trainer.context_parallel > 1
        for problem in _problems(f"policies.{name}", policy)
    ]


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
