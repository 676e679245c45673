"""Lists of operators: made from the run file and checked, all problems at once. Used at load and by the dataflow.

| list                          | may hold                                             |
|-------------------------------|------------------------------------------------------|
| sources.<s>.operators         | operators of a source                                |
| policies.<p>.operators        | operators of a policy, phases filter, shape, weight  |
| policies.<p>.algorithm.advantage | one operator of phase credit, between shape and weight |

Operators are made here even if only to be checked: an option may decide what one makes, and values are checked too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from astraflow.config.rooms import ROOMS, check_options, resolve
from astraflow.config.schema import Component, PolicySection, RunConfig, SourceSection
from astraflow.contracts import Operator
from astraflow.errors import Problem

PHASES = ("filter", "shape", "credit", "weight")
_LISTS = {"source": "sources.<name>.operators", "policy": "policies.<name>.operators"}
_STATE = ("state_dict", "load_state_dict")
_CALLED: dict[str, tuple[str, ...]] = {
    "source": ("admit", "on_result", *_STATE),
    "policy": ("on_group", "sees_difference", "select", "on_batch", "retain", *_STATE),
}
_NEAR = 0.86  # from here on a name is taken for a hook that was misspelt; `selected` and `retained` are not


class Listed(NamedTuple):
    """An operator and where it stands in the run file."""

    where: str
    type: str
    operator: Operator

    def __str__(self) -> str:
        return f"{self.where}={self.type!r}"


class PolicyOperators(NamedTuple):
    """The operators of one policy: its list in order, and its estimator of advantages."""

    listed: list[Listed]
    advantage: Listed | None  # None: it has a problem
    problems: list[str]


class SourceOperators(NamedTuple):
    """The operators of one source, in order."""

    listed: list[Listed]
    problems: list[str]


def operators_of_policy(name: str, policy: PolicySection) -> PolicyOperators:
    """Made from `[policies.<name>]`; with problems they are not to be used."""
    where = f"policies.{name}"
    listed, problems = _make_all("operators", policy.operators, f"{where}.operators", "policy")
    advantage, found = _make("advantages", policy.algorithm.advantage, f"{where}.algorithm.advantage", "policy")
    problems += found
    problems += _order(where, listed)
    if advantage is not None and advantage.operator.phase != "credit":
        problems.append(f"{advantage} is of phase {advantage.operator.phase}, not credit; list it in {where}.operators")
    problems += _made_twice([*listed, advantage] if advantage is not None else listed)
    return PolicyOperators(listed, advantage, problems)


def operators_of_source(name: str, source: SourceSection) -> SourceOperators:
    """Made from `[sources.<name>]`; with problems they are not to be used."""
    return SourceOperators(*_make_all("operators", source.operators, f"sources.{name}.operators", "source"))


def check_operators(config: RunConfig) -> list[str]:
    """All problems of all lists of a run file."""
    problems: list[str] = []
    for name, source in config.sources.items():
        of_source = operators_of_source(name, source)
        problems += of_source.problems
        problems += [_too_small(f"sources.{name}.group_size", config.group_size(name), x) for x in of_source.listed
                     if config.group_size(name) < x.operator.min_siblings]  # fmt: skip
    for name, policy in config.trained.items():
        made = operators_of_policy(name, policy)
        problems += made.problems
        problems += _siblings(config, [*made.listed, *([made.advantage] if made.advantage is not None else [])])
    return problems


def _make_all(
    room: str, specs: Sequence[Component], where: str, place: Literal["source", "policy"]
) -> tuple[list[Listed], list[str]]:
    made, problems = [], []
    for i, spec in enumerate(specs):
        listed, found = _make(room, spec, f"{where}.{i}", place)
        problems += found
        if listed is not None:
            made.append(listed)
    return made, problems


def _make(
    room: str, spec: Component, where: str, place: Literal["source", "policy"]
) -> tuple[Listed | None, list[str]]:
    said = f"{where}={spec.type!r}"
    other = {"operators": "advantages", "advantages": "operators"}[room]
    if spec.type in ROOMS[other] and spec.type not in ROOMS[room]:
        policy = where.split(".operators")[0].split(".algorithm")[0] if place == "policy" else "policies.<name>"
        if room == "operators":
            return None, [f"{said} makes advantages; name it as {policy}.algorithm.advantage"]
        return None, [f"{said} makes no advantages; list it in {policy}.operators"]
    try:
        target = resolve(room, spec.type, f"{where}.type")
    except Problem as error:
        return None, [str(error)]
    if problems := check_options(target, spec.options, where, set()):
        return None, problems
    try:
        operator = target(**spec.options)
    except Problem as error:
        return None, [f"{where}: {error}"]
    except Exception as error:  # an operator of the user may raise anything
        return None, [f"{said} cannot be made ({type(error).__name__}: {error}); check its options"]
    return _of_contract(Listed(where, spec.type, operator), place)


def _of_contract(listed: Listed, place: Literal["source", "policy"]) -> tuple[Listed | None, list[str]]:
    operator: Any = listed.operator
    kind = type(operator)
    if Operator not in kind.__mro__:
        return None, [f"{listed} must inherit astraflow.contracts.Operator; derive its class from it"]
    if operator.place not in _LISTS:
        return None, [f"{listed} has place = {operator.place!r}; places are {', '.join(_LISTS)}"]
    if operator.place != place:
        return None, [f"{listed} is an operator of a {operator.place}; list it in {_LISTS[operator.place]}"]
    if operator.phase not in PHASES:
        return None, [f"{listed} is of phase {operator.phase!r}; phases are {', '.join(PHASES)}"]
    if not isinstance(operator.makes, tuple) or not all(isinstance(thing, str) for thing in operator.makes):
        return None, [f"{listed} has makes = {operator.makes!r}; give a tuple of texts, as ('normalized',)"]
    problems = [f"{listed} {said}" for said in _of_hooks(kind, place)]
    if operator.estimator is not None:
        problems.append(f"{listed} sets estimator, which the list of its policy sets; give it another name")
    if place == "source" and operator.needs_tokens:
        problems.append(f"{listed} has needs_tokens, but operators of a source see no tokens; set it to False")
    return (None, problems) if problems else (listed, [])


def _of_hooks(kind: type[Operator], place: Literal["source", "policy"]) -> list[str]:
    """Hooks that are never called, or give what nobody waits for."""
    problems = []
    known, neutral = _hooks(kind), _hooks(Operator)
    for name, hook in known.items():
        if hook is neutral[name]:
            continue
        if name not in _CALLED[place]:
            problems.append(f"overrides {name}, which is never called for an operator of a {place}; remove it")
        elif inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook):
            problems.append(f"has an async {name}, which nobody awaits; make it a plain function")
    own = {name for cls in kind.__mro__[: kind.__mro__.index(Operator)] for name, x in vars(cls).items() if callable(x)}
    for name in sorted(own - known.keys()):
        if not name.startswith("_") and (near := get_close_matches(name, known, 1, _NEAR)):
            problems.append(f"has a method {name}, which is never called; did you mean {near[0]}? Else rename it")
    return problems


def _hooks(kind: Any) -> dict[str, Any]:
    return {
        "admit": kind.admit,
        "on_result": kind.on_result,
        "on_group": kind.on_group,
        "sees_difference": kind.sees_difference,
        "select": kind.select,
        "on_batch": kind.on_batch,
        "retain": kind.retain,
        "state_dict": kind.state_dict,
        "load_state_dict": kind.load_state_dict,
    }


def _order(where: str, listed: Iterable[Listed]) -> list[str]:
    problems: list[str] = []
    latest: Listed | None = None
    for item in listed:
        phase = item.operator.phase
        if phase == "credit":
            problems.append(f"{item} makes advantages; name it as {where}.algorithm.advantage")
        elif latest is not None and PHASES.index(phase) < PHASES.index(latest.operator.phase):
            problems.append(
                f"{item} ({phase}) must come before {latest.type!r} ({latest.operator.phase}); the order is filter, "
                "shape, weight, and advantages are made between shape and weight"
            )
        else:
            latest = item
    return problems


def _made_twice(listed: Iterable[Listed]) -> list[str]:
    problems: list[str] = []
    makers: dict[str, Listed] = {}
    for item in listed:
        for thing in item.operator.makes:
            first = makers.setdefault(thing, item)
            if first is not item:
                off = next((x for x in (item, first) if "normalize" in _options(x)), None)
                fix = f", or give {off.where} the option normalize = false" if thing == "normalized" and off else ""
                problems.append(f"{item} makes {thing!r}, which {first} makes already; remove one of them{fix}")
    return problems


def _options(listed: Listed) -> set[str]:
    return set(inspect.signature(type(listed.operator)).parameters)


def _siblings(config: RunConfig, listed: Iterable[Listed]) -> list[str]:
    """Group sizes that are too small for what compares siblings."""
    sizes = {"workflow.group_size": config.workflow.group_size}
    own = {f"sources.{s}.group_size": config.sources[s].group_size for s in config.train_sources if s in config.sources}
    if own and None not in own.values():
        sizes = {}
    sizes |= {where: size for where, size in own.items() if size is not None}
    return [
        _too_small(where, size, item)
        for item in listed
        for where, size in sizes.items()
        if size < item.operator.min_siblings
    ]


def _too_small(where: str, size: int, item: Listed) -> str:
    return f"{where}={size} must be >= {item.operator.min_siblings} for {item}; siblings are compared with each other"
