"""From `[workflow]` to something that plays episodes; and the reward functions that workflows name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from astraflow.config.rooms import check_options, choose, resolve
from astraflow.contracts import LLM, RewardFunction
from astraflow.errors import ConfigError
from astraflow.workflows.roles import ByRoles

PlayFunction = Callable[..., Any]
"""`play(task, llm)`: a coroutine function, or a plain one, which then runs in a thread with a blocking `llm`."""


class ComponentLike(Protocol):
    """What is chosen by `type`; `config.schema.Component` is one."""

    @property
    def type(self) -> str: ...

    @property
    def options(self) -> dict[str, Any]: ...


def build_workflow(component: ComponentLike, policies: Sequence[str]) -> PlayFunction:
    """The workflow of `component`; options of a class go to its constructor, those of a function to each call.

    Raises: Problem or ConfigError: unknown type, unknown option, a policy that the run does not have.
    """
    target, options = resolve("workflows", component.type, "workflow.type"), component.options
    is_class = inspect.isclass(target)
    given = set() if is_class else set(list(inspect.signature(target).parameters)[:2])
    problems = check_options(target, options, "workflow", given)
    if problems:
        raise ConfigError("workflow", problems)
    if is_class:
        play = target(**options)
        if isinstance(play, ByRoles):
            play.check(policies, component.type)
        return cast(PlayFunction, play)
    return functools.partial(target, **options) if options else cast(PlayFunction, target)


def choose_policy(llm: Mapping[str, LLM], policy: str | None) -> LLM:
    """The client of `policy`, or of the only policy; that there is one was checked when the workflow was built."""
    return llm[policy] if policy is not None else next(iter(llm.values()))


def reward_function(spec: str | Mapping[str, Any], where: str = "workflow.reward") -> RewardFunction:
    """A built-in name, `module:Class` with options, or `module:function`."""
    return cast(RewardFunction, choose("rewards", spec, where).make())
