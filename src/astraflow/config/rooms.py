"""The extension points: `type = "..."` names become objects here, and nowhere else.

A name is looked up in the room's literal table, else taken as a `module:Object` path, else as an entry point of the
group `astraflow.<room>`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from astraflow.errors import Problem

ROOMS: Mapping[str, Mapping[str, str]] = {
    "sources": {
        "calculator": "astraflow.sources.calculator:CalculatorSource",
        "sums": "astraflow.sources.sums:SumsSource",
        "jsonl": "astraflow.sources.files:JsonlSource",
        "gsm8k": "astraflow.sources.gsm8k:Gsm8kSource",
    },
    "workflows": {
        "single_turn": "astraflow.workflows.single_turn:SingleTurn",
        "tool_use": "astraflow.workflows.tool_use:ToolUse",
    },
    "environments": {
        "calculator": "astraflow.environments.calculator:Calculator",
    },
    "rewards": {
        "exact": "astraflow.rewards.exact:Exact",
        "sums": "astraflow.rewards.numbers:ShapedNumber",
        "gsm8k": "astraflow.rewards.numbers:ShapedGsm8k",
    },
    "operators": {
        "accept_all": "astraflow.dataflow.operators.source.accept_all:AcceptAll",
        "filter_solved": "astraflow.dataflow.operators.source.filter_solved:FilterSolved",
        "greso": "astraflow.dataflow.operators.source.greso:Greso",
        "curriculum": "astraflow.dataflow.operators.source.curriculum:Curriculum",
        "throttle": "astraflow.dataflow.operators.source.throttle:Throttle",
        "keep_all": "astraflow.dataflow.operators.filters.keep_all:KeepAll",
        "zero_variance": "astraflow.dataflow.operators.filters.zero_variance:ZeroVariance",
        "length_filter": "astraflow.dataflow.operators.filters.length_filter:LengthFilter",
        "dedup": "astraflow.dataflow.operators.filters.dedup:Dedup",
        "reward_clip": "astraflow.dataflow.operators.shape.rewards:RewardClip",
        "reward_scale": "astraflow.dataflow.operators.shape.rewards:RewardScale",
        "reward_normalize": "astraflow.dataflow.operators.shape.rewards:RewardNormalize",
        "overlong_penalty": "astraflow.dataflow.operators.shape.overlong_penalty:OverlongPenalty",
        "balance": "astraflow.dataflow.operators.weight.balance:Balance",
        "staleness_weight": "astraflow.dataflow.operators.weight.staleness_weight:StalenessWeight",
        "replay": "astraflow.dataflow.operators.replay:Replay",
    },
    "advantages": {
        "grpo": "astraflow.dataflow.operators.credit.relative:Grpo",
        "dr_grpo": "astraflow.dataflow.operators.credit.relative:DrGrpo",
        "rloo": "astraflow.dataflow.operators.credit.relative:Rloo",
        "leave_one_out": "astraflow.dataflow.operators.credit.relative:Rloo",
        "reinforce_pp": "astraflow.dataflow.operators.credit.reinforce_pp:ReinforcePp",
        "per_call": "astraflow.dataflow.operators.credit.per_call:PerCall",
    },
    "stages": {
        "ref_logprobs": "astraflow.stages.ref_logprobs:RefLogprobs",
        "reward_model": "astraflow.stages.reward_model:RewardModel",
    },
    "losses": {
        "ppo_clip": "astraflow.algorithms.losses:PpoClip",
        "m2po": "astraflow.algorithms.losses:M2po",
    },
    "engines": {
        "local": "astraflow.engines.local:LocalEngine",
        "scripted": "astraflow.engines.scripted:ScriptedEngine",
    },
    "tool_parsers": {
        "hermes": "astraflow.rollout.gateway.tools:HermesParser",
        "bracket": "astraflow.rollout.gateway.tools:BracketParser",
        "none": "astraflow.rollout.gateway.tools:NoParser",
    },
}


CORRECTS_OFF_POLICY = frozenset({"m2po"})
"""Losses of the room whose class says `corrects_off_policy`, written here too because the classes load torch."""


def resolve(room: str, type_name: str, where: str) -> Any:
    """The object named `type_name` in `room`; `where` is the setting's dotted path, for the error.

    Raises: Problem: not found; lists what was tried and the known names.
    """
    table = ROOMS[room]
    path = table.get(type_name)
    if path is None and ":" in type_name:
        path = type_name
    if path is None:
        found = [e for e in entry_points(group=f"astraflow.{room}") if e.name == type_name]
        if found:
            return found[0].load()
        near = difflib.get_close_matches(type_name, table, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise Problem(
            where, type_name, f"is not a known name of {room}",
            f"{hint}known: {', '.join(sorted(table))}; or give 'package.module:Object' "
            f"(no entry point astraflow.{room} has this name either)",
        )  # fmt: skip
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise Problem(
            where, type_name, f"cannot be imported ({error})",
            "check the spelling 'package.module:Object' and that the package is installed and on PYTHONPATH",
        ) from error  # fmt: skip


def check_options(target: Callable[..., Any], options: Mapping[str, Any], where: str, given: set[str]) -> list[str]:
    """Problems of `options` against the keyword parameters of `target`; `given` are names the system itself passes."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return []
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    known = [n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL and n not in given]
    problems = []
    for key, value in options.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}"
            problems.append(f"{where}.{key}={value!r} is not an option of this type; {hint}")
    for name in known:
        p = parameters[name]
        if p.default is p.empty and name not in options:
            problems.append(f"{where}.{name} is missing; this type needs it")
    return problems


def build(room: str, type_name: str, options: Mapping[str, Any], where: str, **given: Any) -> Any:
    """Resolve and call `room`'s `type_name` with `options` and with what the system passes (`given`)."""
    return resolve(room, type_name, where)(**options, **given)
