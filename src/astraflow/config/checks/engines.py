"""What each engine can do, and the settings of a policy that it would serve wrongly."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from astraflow.config.rooms import WEIGHING_CORRECTIONS
from astraflow.config.schema import EngineSection, NodeSection, PolicySection, RunConfig

_CUTS = ("top_p", "top_k", "min_p")
_WIDE_CLIP = 0.01  # above it, the rounding of half precision does not decide what gspo clips


@dataclass(frozen=True)
class Ability:
    """Of one engine; docs/engines.md shows the same table."""

    dtypes: tuple[str, ...]
    default_dtype: str
    adapters: bool  # versions that are LoRA adapters
    whole_logprobs: bool  # those that are recorded are of the policy itself, before top-p, top-k and min-p cut it
    told_temperatures: bool = True  # logprobs may be of another temperature than that of sampling
    versions: bool = True  # weights change while it serves, so it can serve a policy that is trained
    shares_base: bool = False  # one serves all adapters of a base (`contracts.SharesBase`)


ABILITIES: Mapping[str, Ability] = {
    "local": Ability(
        ("float32", "bfloat16", "float16"), "float32", adapters=True, whole_logprobs=True, shares_base=True
    ),
    "vllm": Ability(("float32", "bfloat16", "float16"), "bfloat16", adapters=True, whole_logprobs=True),
    "sglang": Ability(
        ("float32", "bfloat16", "float16"), "bfloat16", adapters=True, whole_logprobs=True, told_temperatures=False
    ),
    "remote": Ability((), "", adapters=False, whole_logprobs=False, told_temperatures=False, versions=False),
    "scripted": Ability(("float32", "bfloat16", "float16"), "float32", adapters=True, whole_logprobs=True),
}
"""Engines of users are not in it: nothing is refused of them."""


def engine_name(engine: EngineSection) -> str:
    """By which trajectories, metrics and `algorithm.engine_corrections` know an engine: `local-bfloat16`. Of a type
    that is not in `ABILITIES` what its path ends with, and the option dtype if it has one."""
    ability = ABILITIES.get(engine.type)
    dtype = engine.options.get("dtype", "" if ability is None else ability.default_dtype)
    name = engine.type.rpartition(":")[2]
    return f"{name}-{dtype}" if dtype else name


def engine_problems(config: RunConfig) -> list[str]:
    """Pairs of engine, algorithm, precision and adapter that would train on numbers that mean something else, and
    bounds of the load of nodes."""
    problems: list[str] = []
    for setting, name, engine in engines_of(config):
        if name in config.policies:
            problems += served_problems(setting, name, config.policies[name], engine)
        else:
            known = ", ".join(config.policies)
            problems.append(f"{setting} names no policy of this run; known: {known}")
    for name, policy in config.trained.items():
        problems += _correction_problems(f"policies.{name}.algorithm.engine_corrections", name, policy, config)
    for place, node in enumerate(config.rollout.nodes):
        problems += _serves_problems(f"rollout.nodes.{place}", node, list(config.policies))
        if node.min_concurrency > node.concurrency:
            problems.append(
                f"rollout.nodes.{place}.min_concurrency={node.min_concurrency} must be <= concurrency="
                f"{node.concurrency}, between which the load decides; lower it, or use 0"
            )
    return problems


def _serves_problems(where: str, node: NodeSection, policies: list[str]) -> list[str]:
    problems = [
        f"{where}.serves={name!r} names no policy of this run; known: {', '.join(policies)}"
        for name in node.serves
        if name not in policies
    ]
    return problems + [
        f"{where}.engines.{name} has no effect, as {where}.serves={node.serves} leaves it out; add it there"
        for name in node.engines
        if node.serves and name in policies and name not in node.serves
    ]


def engines_of(config: RunConfig) -> Iterator[tuple[str, str, EngineSection]]:
    """(setting, policy, engine) of all that the run file names; the policy may not exist."""
    for name, policy in config.policies.items():
        yield f"policies.{name}.engine", name, policy.engine
    for place, node in enumerate(config.rollout.nodes):
        for name, engine in node.engines.items():
            yield f"rollout.nodes.{place}.engines.{name}", name, engine


def served_problems(setting: str, name: str, policy: PolicySection, section: EngineSection) -> list[str]:
    """What is wrong with the policy `name` on an engine, which `setting` names."""
    where, ability = f"policies.{name}", ABILITIES.get(section.type)
    if ability is None:
        return []
    engine, dtype = section.type, section.options.get("dtype", ability.default_dtype)
    if ability.dtypes and dtype not in ability.dtypes:
        return [f"{setting}.dtype={dtype!r} is not one of {', '.join(ability.dtypes)}; choose one of them"]
    fixed = f"{setting}={engine!r} cannot take new weights; use it for a policy with frozen = true"
    if not policy.trained:
        return [fixed] if policy.copy_of is not None and not ability.versions else []
    problems = [] if ability.versions else [fixed]
    if policy.lora is not None and not ability.adapters:
        problems.append(
            f"{where}.lora cannot be with {setting}={engine!r}, which takes no adapters; train all weights, or "
            f"use one of {', '.join(name for name, other in ABILITIES.items() if other.adapters)}"
        )
    if not ability.whole_logprobs and (cuts := _cuts(policy)):
        problems.append(
            f"{where}.sampling.{cuts[0]} cannot be with {setting}={engine!r}, which reports logprobs of what was "
            "cut: they are not the policy's, and ratios would be wrong; leave it out, or use another engine"
        )
    if not ability.told_temperatures and "temperature" in policy.sampling.agents_choose:
        problems.append(
            f"{where}.sampling.agents_choose=['temperature'] cannot be with {setting}={engine!r}, which says the "
            "logprobs of the temperature that it samples at, and the trainer scores at one; take it out of the list, "
            "or use another engine"
        )
    return problems + _precision_problems(setting, where, policy, section)


def _cuts(policy: PolicySection) -> list[str]:
    """Settings that let the engine sample from less than the policy."""
    sampling = policy.sampling
    asked = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    return [name for name in _CUTS if asked[name] or name in sampling.agents_choose]


def _precision_problems(setting: str, where: str, policy: PolicySection, engine: EngineSection) -> list[str]:
    """The mean of a sequence's rounding in half precision is larger than the clip that gspo has from its paper."""
    algorithm, loss = policy.algorithm, policy.algorithm.loss
    weighed = any(c.type in WEIGHING_CORRECTIONS for c in algorithm.corrections_of(engine_name(engine)))
    if loss.type != "gspo" or algorithm.anchor == "proximal" or weighed:
        return []
    clips = {"clip_low": 3e-4, "clip_high": 4e-4} | loss.options
    numbers = [v for name, v in clips.items() if name.startswith("clip_") and isinstance(v, int | float)]
    if not numbers or (clip := min(numbers)) >= _WIDE_CLIP:
        return []
    dtype = engine.options.get("dtype", ABILITIES[engine.type].default_dtype)
    for at, value in ((f"{setting}.dtype", dtype), (f"{where}.trainer.dtype", policy.trainer.dtype)):
        if value != "float32":
            return [
                f"{at}={value!r} cannot be with {where}.algorithm.loss='gspo' and its clip of {clip:g}: rounding "
                f"alone moves the mean ratio of a sequence further, and nearly all would be clipped; set "
                f"{where}.algorithm.anchor = 'proximal', or float32"
            ]
    return []


def _correction_problems(where: str, name: str, policy: PolicySection, config: RunConfig) -> list[str]:
    """Names that no engine has: nodes that join by hand may bring any engine that is known."""
    known = {f"{engine}-{dtype}" for engine, ability in ABILITIES.items() for dtype in ability.dtypes}
    known |= {engine_name(engine) for _, served, engine in engines_of(config) if served == name}
    problems = []
    for engine in policy.algorithm.engine_corrections:
        if engine not in known:
            near = difflib.get_close_matches(engine, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            problems.append(f"{where}.{engine} names no engine, which is its type and its dtype; {hint}")
    return problems
