"""The extension points: `type = "..."` names become objects here, and nowhere else.

A name is looked up in the room's literal table, else taken as a `module:Object` or `file.py:Object` path, else as an
entry point of the group `astraflow.<room>`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from astraflow.errors import ConfigError, Problem

log = logging.getLogger(__name__)

ROOMS: Mapping[str, Mapping[str, str]] = {
    "sources": {
        "calculator": "astraflow.sources.calculator:CalculatorSource",
        "sums": "astraflow.sources.sums:SumsSource",
        "seeds": "astraflow.sources.seeds:SeedsSource",
        "played": "astraflow.sources.demos.played:PlayedSource",
        "scripted": "astraflow.sources.demos.scripted:ScriptedSource",
        "jsonl": "astraflow.sources.files:JsonlSource",
        "dataset": "astraflow.sources.tables.dataset:DatasetSource",
        "gsm8k": "astraflow.sources.gsm8k:Gsm8kSource",
        "humaneval": "astraflow.sources.code.humaneval:HumanEvalSource",
        "mbpp": "astraflow.sources.code.mbpp:MbppSource",
        "programs": "astraflow.sources.code.programs:ProgramsSource",
        "snippets": "astraflow.sources.code.snippets:SnippetsSource",
        "reasoning_gym": "astraflow.sources.gym.source:ReasoningGymSource",
        "svamp": "astraflow.sources.svamp:SvampSource",
        "wiki2hop": "astraflow.sources.wiki2hop:Wiki2HopSource",
    },
    "workflows": {
        "single_turn": "astraflow.workflows.single_turn:SingleTurn",
        "tool_use": "astraflow.workflows.tool_use:ToolUse",
        "search_r1": "astraflow.workflows.search_r1:SearchR1",
        "actor_verifier": "astraflow.workflows.teams.actor_verifier:ActorVerifier",
        "solver_selector": "astraflow.workflows.teams.solver_selector:SolverSelector",
        "planner_executor": "astraflow.workflows.teams.planner_executor:PlannerExecutor",
        "router": "astraflow.workflows.teams.router:Router",
        "best_of_n": "astraflow.workflows.teams.best_of_n:BestOfN",
        "self_play": "astraflow.workflows.teams.self_play:SelfPlay",
        "recursive": "astraflow.workflows.teams.recursive:Recursive",
        "coder_tester": "astraflow.workflows.teams.coder_tester:CoderTester",
        "verifiers": "astraflow.workflows.foreign.verifiers:Verifiers",
        "swarm": "astraflow.workflows.elsewhere:Elsewhere",
    },
    "environments": {
        "calculator": "astraflow.environments.calculator:Calculator",
        "search": "astraflow.environments.search:Search",
        "gymnasium": "astraflow.environments.adapters.gymnasium:Gymnasium",
        "textarena": "astraflow.environments.adapters.textarena:TextArena",
        "http": "astraflow.environments.adapters.http:Http",
        "mcp": "astraflow.environments.adapters.mcp.environment:Mcp",
    },
    "rewards": {
        "exact": "astraflow.rewards.exact:Exact",
        "exact_match": "astraflow.rewards.answers:ExactMatch",
        "f1": "astraflow.rewards.answers:F1",
        "sums": "astraflow.rewards.numbers:ShapedNumber",
        "gsm8k": "astraflow.rewards.numbers:ShapedGsm8k",
        "calculation": "astraflow.rewards.calculation:Calculation",
        "code": "astraflow.rewards.code:Code",
        "function": "astraflow.rewards.function:Function",
        "judge": "astraflow.rewards.judge:Judge",
        "math": "astraflow.rewards.math.grader:Math",
        "reasoning_gym": "astraflow.rewards.gym:ReasoningGym",
    },
    "encoders": {},
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
        "gae": "astraflow.dataflow.operators.credit.in_trainer:Gae",
        "distill": "astraflow.dataflow.operators.credit.in_trainer:Distill",
    },
    "stages": {
        "ref_logprobs": "astraflow.stages.ref_logprobs:RefLogprobs",
        "reward_model": "astraflow.stages.reward_model:RewardModel",
    },
    "losses": {
        "ppo_clip": "astraflow.algorithms.losses.ppo_clip:PpoClip",
        "m2po": "astraflow.algorithms.losses.m2po:M2po",
        "reinforce": "astraflow.algorithms.losses.reinforce:Reinforce",
        "gspo": "astraflow.algorithms.losses.gspo:Gspo",
        "cispo": "astraflow.algorithms.losses.cispo:Cispo",
        "sapo": "astraflow.algorithms.losses.sapo:Sapo",
        "decoupled_ppo": "astraflow.algorithms.losses.decoupled_ppo:DecoupledPpo",
    },
    "corrections": {
        "truncate": "astraflow.algorithms.corrections:Truncate",
        "mask": "astraflow.algorithms.corrections:Mask",
        "reject": "astraflow.algorithms.corrections:Reject",
    },
    "engines": {
        "local": "astraflow.engines.local:LocalEngine",
        "scripted": "astraflow.engines.scripted:ScriptedEngine",
        "vllm": "astraflow.engines.vllm.engine:VllmEngine",
        "sglang": "astraflow.engines.sglang.engine:SglangEngine",
        "remote": "astraflow.engines.remote.engine:RemoteEngine",
    },
    "tool_parsers": {
        "hermes": "astraflow.rollout.gateway.tools:HermesParser",
        "llama3": "astraflow.rollout.gateway.tools:LlamaParser",
        "bracket": "astraflow.rollout.gateway.tools:BracketParser",
        "none": "astraflow.rollout.gateway.tools:NoParser",
    },
}


CORRECTS_OFF_POLICY = frozenset({"m2po", "decoupled_ppo"})
"""Losses of the room whose class says `corrects_off_policy`, written here too because the classes load torch."""
WEIGHING_CORRECTIONS = frozenset({"truncate", "mask"})
"""Corrections whose class says `weighs`: any loss is right with one."""


def find(room: str, type_name: str, where: str) -> str:
    """Where `type_name` of `room` lies, as `module:Object` or `file.py:Object`; nothing is imported. `where`: the
    setting's dotted path.

    Raises: Problem: not found; lists what was tried and the known names.
    """
    table = ROOMS[room]
    path = table.get(type_name)
    if path is None and ":" in type_name:
        path = type_name
    if path is None:
        path = next(
            (f"{e.module}:{e.attr}" for e in entry_points(group=f"astraflow.{room}") if e.name == type_name), None
        )
    if path is None:
        near = difflib.get_close_matches(type_name, table, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise Problem(
            where, type_name, f"is not a known name of {room}",
            f"{hint}known: {', '.join(sorted(table))}; or give 'FILE.py:NAME' or 'package.module:Object' "
            f"(no entry point astraflow.{room} has this name either)",
        )  # fmt: skip
    return path


def resolve(room: str, type_name: str, where: str) -> Any:
    """The object named `type_name` in `room`; `where` is the setting's dotted path, for the error.

    Raises: Problem: not found, as `find`, or not to be imported.
    """
    module_name, _, attribute = find(room, type_name, where).rpartition(":")
    try:
        return getattr(_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise Problem(
            where, type_name, f"cannot be imported ({error})",
            "check the spelling, 'FILE.py:NAME' or 'package.module:Object', and that what it imports is installed",
        ) from error  # fmt: skip


def _module(name: str) -> ModuleType:
    """A module by its name, or by its file, whose folder is then searched first for what it imports."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    if (folder := str(path.parent)) not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(path.stem)
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise ImportError(f"the name {path.stem} is taken by {module.__file__ or 'Python itself'}; rename the file")
    return module


def check_options(
    target: Callable[..., Any], options: Mapping[str, Any], where: str, given: set[str], also: Iterable[str] = ()
) -> list[str]:
    """Problems of `options` against the keyword parameters of `target` and the types that they are annotated with.

    Args: given: names that the system itself passes. also: settings of the section, which may have been meant.
    """
    parameters = _parameters(target)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    known = [n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL and n not in given]
    problems = []
    for key, value in options.items():
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *also], n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}"
            problems.append(f"{where}.{key}={value!r} is not an option of this type; {hint}")
        elif rule := _type_problem(parameters[key].annotation, value):
            problems.append(f"{where}.{key}={value!r} {rule}; see docs/configuration.md")
    for name in known:
        p = parameters[name]
        if p.default is p.empty and name not in options:
            problems.append(f"{where}.{name} is missing; this type needs it")
    return problems


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """With annotations as types where they can be; of something that has no signature, `**options`."""
    try:
        return inspect.signature(target, eval_str=True).parameters
    except Exception as error:  # annotations of a user are any code; what they say is then not checked
        log.debug("annotations of %r cannot be read (%s)", target, error)
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


def _type_problem(annotation: Any, value: Any) -> str:
    """The rule that a value of a run file breaks, or "". An annotation that says nothing of TOML values allows all."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return ""
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError  # takes 50 ms

    try:  # as JSON, where a list may be a tuple and a text a path, but nothing else is taken for something else
        TypeAdapter(annotation).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        return " or ".join(dict.fromkeys(e["msg"].replace("Input should be", "must be") for e in error.errors()))
    except (PydanticSchemaGenerationError, PydanticUserError):
        return ""
    return ""


def build(room: str, type_name: str, options: Mapping[str, Any], where: str, **given: Any) -> Any:
    """Resolve and call `room`'s `type_name` with `options` and with what the system passes (`given`)."""
    return resolve(room, type_name, where)(**options, **given)


class Chosen(NamedTuple):
    """What a setting such as `{type = "name", option = ...}` names, looked up and with checked options."""

    type: str
    target: Any
    options: dict[str, Any]

    def make(self) -> Any:
        """A function with its options; of anything else, a fresh one made with them."""
        if inspect.isfunction(self.target):
            return functools.partial(self.target, **self.options) if self.options else self.target
        return self.target(**self.options)


def choose(room: str, spec: str | Mapping[str, Any], where: str) -> Chosen:
    """What `spec`, a name or `{type = ..., option = ...}`, names. Raises: Problem or ConfigError, with `where`."""
    options = {"type": spec} if isinstance(spec, str) else dict(spec)
    type_name = options.pop("type", None)
    if not isinstance(type_name, str):
        raise Problem(f"{where}.type", type_name, "must be a text", 'write a name or {type = "name", ...}')
    target = resolve(room, type_name, f"{where}.type")
    if not inspect.isfunction(target) and (problems := check_options(target, options, where, set())):
        raise ConfigError(where, problems)
    return Chosen(type_name, target, options)


def required(module: str, extra: str) -> Any:
    """The imported `module` of an optional package. Raises: Problem: it is not installed; names the pip command."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Problem(
            "package", error.name or module, "is not installed", f"run: pip install 'astraflow[{extra}]'"
        ) from error
