"""Gymnasium environments with a few discrete actions, told in words: FrozenLake, Blackjack, Taxi, CliffWalking."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from astraflow.config.rooms import required
from astraflow.contracts import Environment
from astraflow.errors import Problem
from astraflow.types import Action, Step, Task

gymnasium = required("gymnasium", "gymnasium")

_WORD = re.compile(r"[a-z0-9]+")
_HIGHLIGHT = re.compile(r"\x1b\[4\dm(.)\x1b\[0m")  # where the player is
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PLACES = ("R", "G", "Y", "B", "the taxi")


class Known(NamedTuple):
    """How a game is told."""

    rules: str
    actions: tuple[str, ...]
    won: Callable[[float], bool]  # of the reward of a step that ended it
    tell: Callable[[Any, Any], str] | None = None  # (environment, observation) -> what the picture does not show


def _taxi(world: Any, seen: int) -> str:
    _, _, passenger, goal = world.unwrapped.decode(seen)
    return f"The passenger is at {_PLACES[passenger]} and wants to go to {_PLACES[goal]}."


def _cards(world: Any, seen: Sequence[int]) -> str:
    mine, shown, ace = seen
    return f"You have {mine}{' with an ace that counts 11' if ace else ''}. The dealer shows {shown}."


_FOUR = ("left", "down", "right", "up")
KNOWN: Mapping[str, Known] = {
    "FrozenLake": Known("Walk over the ice from S to G; who steps on H falls in.", _FOUR, lambda r: r > 0),
    "CliffWalking": Known(
        "Walk from x to T; who steps on C falls off the cliff and starts again.", ("up", "right", "down", "left"),
        lambda r: True,
    ),
    "Taxi": Known(
        "Drive to the passenger, pick them up, and drop them off where they want to go.",
        ("south", "north", "east", "west", "pickup", "dropoff"), lambda r: r > 0, _taxi,
    ),
    "Blackjack": Known("Come closer to 21 than the dealer, and not above.", ("stick", "hit"), lambda r: r > 0, _cards),
}  # fmt: skip


class Gymnasium(Environment):
    """An action is the last word of a reply that is one of `actions`, or its number. Anything else is no move.

    `show`: "picture": its text picture where it has one, the player in brackets, and what is known of it in words;
    "state": the bare observation, as small models need it. `reward`: "own", or "success": 1 for a game that is won.
    """

    def __init__(
        self, *, id: str, options: Mapping[str, Any] | None = None, actions: Sequence[str] = (),
        show: Literal["picture", "state"] = "picture", reward: Literal["own", "success"] = "own", tool: bool = False,
        runs: Literal["cheap", "cpu"] = "cheap",
    ) -> None:  # fmt: skip
        """`id`, `options`: as of `gymnasium.make`. `actions`: names of actions 0, 1, ...; default: known ones, else the
        numbers. `tool`: acted in by calls of the tool `act`. `runs`: "cpu" for one whose steps take milliseconds.

        Raises: Problem: no such environment, or one whose actions are not a few discrete ones.
        """
        if show not in ("picture", "state") or reward not in ("own", "success"):
            raise Problem("gymnasium.show", f"{show}, reward={reward}", "is not known", "see docs/workloads.md")
        self._known = KNOWN.get(id.rpartition("-v")[0])
        self._show, self._success_only = show, reward == "success"
        self._world = _made(id, dict(options or {}), show)
        count = int(getattr(self._world.action_space, "n", 0))
        if not count:
            raise Problem(
                "gymnasium.id", id, f"has actions {self._world.action_space}", "use one of Discrete actions, or wrap it"
            )
        self._actions = tuple(actions or (self._known.actions if self._known else map(str, range(count))))
        if len(self._actions) != count:
            raise Problem("gymnasium.actions", self._actions, f"must name {count} actions", "name them from 0 on")
        self._numbers = {name.lower(): i for i, name in enumerate(self._actions)}
        self._numbers |= {str(i): i for i in range(count) if str(i) not in self._numbers}
        self._tool, self.runs = tool, runs

    @property
    def tools(self) -> list[dict[str, Any]]:
        if not self._tool:
            return []
        action = {"type": "string", "enum": list(self._actions)}
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        return [{"type": "function", "function": {"name": "act", "description": "Move.", "parameters": parameters}}]

    def reset(self, task: Task) -> str:
        self._invalid = 0
        seen, _ = self._world.reset(seed=task.seed)
        if self._show == "state":
            return self._told(seen)
        rules = [self._known.rules] if self._known else []
        say = "Call act with one of" if self._tool else "Say one of"
        return "\n".join([*rules, f"{say}: {', '.join(self._actions)}.", self._told(seen)])

    def step(self, action: Action) -> Step:
        number = self._number(action)
        if number is None:
            self._invalid += 1
            return Step(f"No move. Say one of: {', '.join(self._actions)}.", metrics={"invalid": float(self._invalid)})
        seen, reward, terminated, truncated, _ = self._world.step(number)
        done = bool(terminated or truncated)
        won = bool(terminated) and (self._known.won(float(reward)) if self._known else float(reward) > 0)
        metrics = {"success": float(won), "invalid": float(self._invalid)}
        if truncated and not terminated:
            metrics["truncated"] = 1.0
        return Step(self._told(seen), float(won if self._success_only else reward), done, metrics)

    def close(self) -> None:
        self._world.close()

    def _number(self, action: Action) -> int | None:
        said = action.text
        if self._tool:
            said = str(action.arguments.get("action", "")) if action.tool == "act" else ""
        words = [word for word in _WORD.findall(said.lower()) if word in self._numbers]
        return self._numbers[words[-1]] if words else None

    def _told(self, seen: Any) -> str:
        if self._show == "state":
            return " ".join(map(str, seen)) if isinstance(seen, tuple) else str(seen)
        told = [self._known.tell(self._world, seen)] if self._known and self._known.tell else []
        if self._world.render_mode == "ansi":
            told.append(_COLOUR.sub("", _HIGHLIGHT.sub(r"[\1]", self._world.render())).strip("\n"))
        return "\n".join(told or [str(seen)])


def _made(name: str, options: dict[str, Any], show: str) -> Any:
    spec = gymnasium.envs.registry.get(name)
    if spec is None:
        near = ", ".join(sorted(k for k in gymnasium.envs.registry if k.split("-")[0] == name.split("-")[0]))
        toys = "FrozenLake-v1, Blackjack-v1, Taxi-v4, CliffWalking-v1"
        raise Problem("gymnasium.id", name, "is not registered", f"known here: {near or toys}")
    try:
        world = gymnasium.make(name, **options)
        if show == "picture" and "ansi" in world.metadata.get("render_modes", ()):
            world.close()
            world = gymnasium.make(name, **{"render_mode": "ansi", **options})
    except Exception as error:
        raise Problem("gymnasium.id", name, f"cannot be made ({error})", "mend its options") from error
    return world
