"""What each engine can do, and the settings of a policy that it would serve wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from astraflow.config.rooms import WEIGHING_CORRECTIONS
from astraflow.config.schema import PolicySection, RunConfig

_CUTS = ("top_p", "top_k", "min_p")
_WIDE_CLIP = 0.01  # above it, the rounding of half precision does not decide what gspo clips


@dataclass(frozen=True)
class Ability:
    """Of one engine; docs/engines.md shows the same table."""

    dtypes: tuple[str, ...]
    default_dtype: str
    adapters: bool  # versions that are LoRA adapters
    whole_logprobs: bool  # those that are recorded are of the policy itself, before top-p, top-k and min-p cut it
    versions: bool = True  # weights change while it serves, so it can serve a policy that is trained


ABILITIES: Mapping[str, Ability] = {
    "local": Ability(("float32", "bfloat16", "float16"), "float32", adapters=True, whole_logprobs=True),
    "vllm": Ability(("float32", "bfloat16", "float16"), "bfloat16", adapters=True, whole_logprobs=True),
    "scripted": Ability(("float32", "bfloat16", "float16"), "float32", adapters=True, whole_logprobs=True),
}
"""Engines of users are not in it: nothing is refused of them."""


def engine_problems(config: RunConfig) -> list[str]:
    """Pairs of engine, algorithm, precision and adapter that would train on numbers that mean something else, and
    bounds of the load of nodes."""
    problems: list[str] = []
    for name, policy in config.policies.items():
        ability = ABILITIES.get(policy.engine.type)
        if ability is not None:
            problems += _problems_of(f"policies.{name}", policy, ability)
    for place, node in enumerate(config.rollout.nodes):
        if node.min_concurrency > node.concurrency:
            problems.append(
                f"rollout.nodes.{place}.min_concurrency={node.min_concurrency} must be <= concurrency="
                f"{node.concurrency}, between which the load decides; lower it, or use 0"
            )
    return problems


def _problems_of(where: str, policy: PolicySection, ability: Ability) -> list[str]:
    engine, dtype = policy.engine.type, policy.engine.options.get("dtype", ability.default_dtype)
    if dtype not in ability.dtypes:
        return [f"{where}.engine.dtype={dtype!r} is not one of {', '.join(ability.dtypes)}; choose one of them"]
    if not policy.trained:
        return []
    problems = []
    if not ability.versions:
        problems.append(f"{where}.engine={engine!r} cannot take new weights; use it for a policy with frozen = true")
    if policy.lora is not None and not ability.adapters:
        problems.append(
            f"{where}.lora cannot be with {where}.engine={engine!r}, which takes no adapters; train all weights, or "
            f"use one of {', '.join(name for name, other in ABILITIES.items() if other.adapters)}"
        )
    if not ability.whole_logprobs and (cuts := _cuts(policy)):
        problems.append(
            f"{where}.sampling.{cuts[0]} cannot be with {where}.engine={engine!r}, which reports logprobs of what was "
            "cut: they are not the policy's, and ratios would be wrong; leave it out, or use another engine"
        )
    return problems + _precision_problems(where, policy, dtype)


def _cuts(policy: PolicySection) -> list[str]:
    """Settings that let the engine sample from less than the policy."""
    sampling = policy.sampling
    asked = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    return [name for name in _CUTS if asked[name] or name in sampling.agents_choose]


def _precision_problems(where: str, policy: PolicySection, dtype: str) -> list[str]:
    """The mean of a sequence's rounding in half precision is larger than the clip that gspo has from its paper."""
    algorithm, loss = policy.algorithm, policy.algorithm.loss
    weighed = any(correction.type in WEIGHING_CORRECTIONS for correction in algorithm.corrections)
    if loss.type != "gspo" or algorithm.anchor == "proximal" or weighed:
        return []
    clips = {"clip_low": 3e-4, "clip_high": 4e-4} | loss.options
    numbers = [v for name, v in clips.items() if name.startswith("clip_") and isinstance(v, int | float)]
    if not numbers or (clip := min(numbers)) >= _WIDE_CLIP:
        return []
    for setting, value in ((f"{where}.engine.dtype", dtype), (f"{where}.trainer.dtype", policy.trainer.dtype)):
        if value != "float32":
            return [
                f"{setting}={value!r} cannot be with {where}.algorithm.loss='gspo' and its clip of {clip:g}: rounding "
                f"alone moves the mean ratio of a sequence further, and nearly all would be clipped; set "
                f"{where}.algorithm.anchor = 'proximal', or float32"
            ]
    return []
