"""What the settings of a policy's trainer may ask for together."""

from __future__ import annotations

from astraflow.config.schema import PolicySection, RunConfig


def training_problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with how policies are trained, one sentence each."""
    problems: list[str] = []
    for name, policy in config.policies.items():
        problems += _update_problems(f"policies.{name}", policy)
    return problems


def _update_problems(where: str, policy: PolicySection) -> list[str]:
    problems, batch, loss = [], policy.batch, policy.algorithm.loss.type
    if not batch.episodes and batch.minibatches > batch.groups:
        problems.append(
            f"{where}.batch.minibatches={batch.minibatches} must be <= {where}.batch.groups={batch.groups}, as a "
            "minibatch holds whole groups; lower it, or use batch.epochs for more updates"
        )
    if policy.algorithm.anchor == "proximal" and loss == "decoupled_ppo":
        problems.append(
            f"{where}.algorithm.anchor='proximal' takes away the weight of {where}.algorithm.loss='decoupled_ppo', "
            "which has a proximal policy of its own; leave it out"
        )
    return problems
