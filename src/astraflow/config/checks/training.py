"""What the settings of a policy's trainer may ask for together."""

from __future__ import annotations

from astraflow.config.schema import OptimizerSection, PolicySection, RunConfig

GAE, DISTILL = "gae", "distill"
"""The estimators whose advantages the trainer makes, with a critic or a teacher."""


def training_problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with how policies are trained, one sentence each."""
    problems: list[str] = []
    for name, policy in config.trained.items():
        where = f"policies.{name}"
        problems += _optimizer_problems(f"{where}.optimizer", policy.optimizer, config.steps_of(name))
        problems += [
            *_update_problems(where, policy),
            *_critic_problems(where, policy),
            *_distill_problems(where, policy),
        ]
        if policy.lora is not None and policy.trainer.frozen:
            problems.append(
                f"{where}.trainer.frozen={policy.trainer.frozen} has no effect with {where}.lora, which trains nothing "
                "but its adapter; leave it out, or name the layers of the adapter by lora.targets"
            )
        if policy.trainer.kernels == "liger" and policy.trainer.device == "cpu":
            problems.append(
                f"{where}.trainer.kernels='liger' needs a GPU, and {where}.trainer.device='cpu'; use kernels = 'torch'"
            )
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


def _critic_problems(where: str, policy: PolicySection) -> list[str]:
    problems, advantage = [], policy.algorithm.advantage.type
    if advantage == GAE and policy.critic is None:
        problems.append(
            f"{where}.algorithm.advantage={advantage!r} needs a critic; add {where}.critic with its lr, or compare "
            "siblings: advantage = 'grpo'"
        )
    if policy.critic is not None and advantage != GAE:
        problems.append(
            f"{where}.critic has no effect with {where}.algorithm.advantage={advantage!r}, which makes advantages "
            f"without one; use advantage = {GAE!r}, or leave the critic out"
        )
    if policy.critic is not None and policy.trainer.dtype == "float16":
        problems.append(
            f"{where}.trainer.dtype='float16' cannot be with {where}.critic, whose losses are not scaled; use bfloat16"
        )
    if policy.critic is not None and policy.algorithm.mask_truncated:
        problems.append(
            f"{where}.algorithm.mask_truncated=true cannot be with {where}.critic, which needs the whole of an episode "
            "to say what a token is worth; use the operators overlong_penalty or length_filter"
        )
    return problems


def _distill_problems(where: str, policy: PolicySection) -> list[str]:
    problems, algorithm = [], policy.algorithm
    if algorithm.advantage.type == DISTILL and algorithm.distill is None:
        problems.append(
            f"{where}.algorithm.advantage={DISTILL!r} needs a teacher; add {where}.algorithm.distill with a model as "
            "teacher"
        )
    if algorithm.distill is not None and algorithm.kl is not None:
        problems.append(
            f"{where}.algorithm.kl cannot be beside {where}.algorithm.distill: the teacher is what the policy is kept "
            "near; leave one of them out"
        )
    return problems


def _optimizer_problems(where: str, section: OptimizerSection, steps: int) -> list[str]:
    adam, plain = section.type != "sgd", OptimizerSection()
    idle = {
        "momentum": (adam and section.momentum != plain.momentum, f"type={section.type!r}"),
        "betas": (not adam and section.betas != plain.betas, "type='sgd'"),
        "eps": (not adam and section.eps != plain.eps, "type='sgd'"),
        "decay_steps": (section.schedule != "wsd" and section.decay_steps > 0, f"schedule={section.schedule!r}"),
        "min_lr_ratio": (section.schedule == "constant" and section.min_lr_ratio > 0, "schedule='constant'"),
    }
    values = section.model_dump()
    problems = [
        f"{where}.{name}={values[name]} has no effect with {where}.{why}; leave it out"
        for name, (has_none, why) in idle.items()
        if has_none
    ]
    if section.warmup_steps + section.decay_steps > steps:
        problems.append(
            f"{where}.warmup_steps={section.warmup_steps} and decay_steps={section.decay_steps} must be <= "
            f"run.steps={steps} together; lower one of them"
        )
    return problems
