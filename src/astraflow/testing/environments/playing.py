"""Environments played without a model: policies, what they were told, and its digest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

from astraflow.environments.worlds import World, Worlds
from astraflow.types import Action, Step, Task

Policy = Callable[[Task, Sequence[Step], random.Random], Action | str]
"""`(task, what it was told so far, its chance) -> what it does`; a text is an action without a tool. The first step is
the opening: the text of its last message."""
PolicyOf = Callable[[Sequence[dict[str, Any]]], Policy]
"""A policy of the tools of an environment."""


class Played(msgspec.Struct):
    """One episode."""

    task: Task
    actions: list[Action]
    steps: list[Step]  # one more than actions: the opening first

    @property
    def reward(self) -> float | None:
        """Of side 0; None: unscored."""
        total = 0.0
        for step in self.steps:
            if step.reward is None:
                return None
            total += step.reward[0] if isinstance(step.reward, list) else step.reward
        return total


async def opened(world: World, task: Task) -> Step:
    """The opening as a step."""
    messages, side = await world.reset(task)
    return Step(str(messages[-1].get("content") or "") if messages else "", side=side)


async def play(worlds: Worlds, task: Task, policy_of: PolicyOf, max_turns: int) -> Played:
    """An episode by a policy, of so many actions at most."""
    world, chance = worlds.open(), random.Random(task.group_id)
    try:
        played = Played(task, [], [await opened(world, task)])
        policy = policy_of(world.tools)
        while len(played.actions) < max_turns and not played.steps[-1].done:
            said = policy(task, played.steps, chance)
            action = Action(text=said) if isinstance(said, str) else said
            turn, side = len(played.actions) + 1, played.steps[-1].side
            action = msgspec.structs.replace(action, turn=turn, side=side)
            played.actions.append(action)
            played.steps.append(await world.step(action))
        return played
    finally:
        await world.close()


async def replay(worlds: Worlds, played: Sequence[Played]) -> list[list[Step]]:
    """The same actions in environments that take turns: what each tells now."""
    open_now = [worlds.open() for _ in played]
    try:
        steps = [[await opened(world, one.task)] for world, one in zip(open_now, played, strict=True)]
        for turn in range(max((len(one.actions) for one in played), default=0)):
            for world, one, told in zip(open_now, played, steps, strict=True):
                if turn < len(one.actions):
                    told.append(await world.step(one.actions[turn]))
        return steps
    finally:
        for world in open_now:
            await world.close()


def digest(steps: Sequence[Sequence[Step]]) -> str:
    """Of everything that was told."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(steps, order="deterministic"))


def nothing(task: Task, told: Sequence[Step], chance: random.Random) -> str:
    """The null policy: it says nothing."""
    return ""


def at_random(texts: Sequence[str], tools: Sequence[dict[str, Any]]) -> Policy:
    """One of the texts, or a call of one of the tools with arguments that fit its schema."""

    def policy(task: Task, told: Sequence[Step], chance: random.Random) -> Action:
        place = chance.randrange(len(texts) + len(tools)) if texts or tools else 0
        if place < len(texts):
            return Action(text=texts[place])
        if not tools:
            return Action(text=str(chance.randrange(10)))
        function = tools[place - len(texts)]["function"]
        return Action(tool=function["name"], arguments=_any_of(function.get("parameters") or {}, chance))

    return policy


def _any_of(schema: dict[str, Any], chance: random.Random) -> Any:
    if "enum" in schema:
        return chance.choice(schema["enum"])
    match schema.get("type"):
        case "object" | None:
            properties = schema.get("properties") or {}
            return {name: _any_of(of, chance) for name, of in sorted(properties.items())}
        case "array":
            return [_any_of(schema.get("items") or {"type": "string"}, chance) for _ in range(chance.randrange(3))]
        case "integer":
            return chance.randrange(10)
        case "number":
            return chance.random()
        case "boolean":
            return chance.random() < 0.5
    return chance.choice(["", "a", "1", "1+1"])
