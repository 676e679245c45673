"""A game for two: a player that is trained, against one of a pool of opponents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.contracts import LLM
from astraflow.environments.worlds import ENV_TIMEOUT_S, World, Worlds
from astraflow.errors import EpisodeError, Problem
from astraflow.types import Action, Message, Outcome, Step, Task
from astraflow.workflows.roles import ByRoles, at_least


class SelfPlay(ByRoles):
    """Both sides move in turn, each in a conversation of its own, until the game is over or `max_moves` were made.

    The opponent is chosen by the task, so that siblings meet the same one: the pool is walked through row by row.
    Opponents that are trained earn the score of their side; past versions of the player are policies with `copy_of`,
    and earn nothing. An opponent that is the player itself moves as agent `<player>@1`, its other self as `@0`.
    """

    def __init__(
        self,
        *,
        environment: str | Mapping[str, Any],
        player: str = "player",
        opponents: Sequence[str] = ("opponent",),
        max_moves: int = 64,
        env_timeout_s: float = ENV_TIMEOUT_S,
        pool: Mapping[str, Any] | None = None,
    ) -> None:
        """`environment`: one of two sides. `env_timeout_s`, `pool`: as of `tool_use`."""
        if not opponents:
            raise Problem("workflow.opponents", [], "must name at least one policy", f"for example [{player!r}]")
        roles = {"player": player, **{f"opponents.{i}": name for i, name in enumerate(opponents)}}
        super().__init__(roles)
        self._worlds = Worlds(environment, sides=2, env_timeout_s=env_timeout_s, pool=pool)
        self._player, self._opponents = player, list(opponents)
        self._max_moves = at_least("max_moves", max_moves, 1, "give the longest game, in moves of both sides")

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        opponent = self._opponents[(task.row + task.epoch) % len(self._opponents)]
        mirror = opponent == self._player
        sides = [f"{name}@{side}" if mirror else name for side, name in enumerate((self._player, opponent))]
        world = self._worlds.open()
        try:
            return await self._play(task, world, llm, sides)
        finally:
            await world.close()

    async def _play(self, task: Task, world: World, llm: Mapping[str, LLM], sides: list[str]) -> Outcome:
        talks: list[list[Message]] = [[], []]
        scores, metrics = [0.0, 0.0], {"success": 0.0}
        told, side = await world.reset(task)
        moves, done, unscored = 0, False, False
        while moves < self._max_moves and not done:
            talks[side] += told
            reply = await llm[sides[side].partition("@")[0]].chat(talks[side], model=sides[side])
            talks[side].append(reply.message)
            moves += 1
            text = (reply.content or "").strip()
            step = await world.step(Action(text=text, finish_reason=reply.finish_reason, turn=moves, side=side))
            unscored = unscored or step.reward is None
            scores = [score + more for score, more in zip(scores, _by_side(step, side), strict=True)]
            metrics["success"] = float(scores[0] > scores[1])
            metrics.update(step.metrics)
            told, side, done = [{"role": "user", "content": step.text}], step.side, step.done
        metrics |= {"moves": float(moves), "truncated": float(not done)}
        if unscored:
            return Outcome(metrics=metrics)
        rewards: dict[str, float | None] = {
            name: score for name, score, talk in zip(sides, scores, talks, strict=True) if talk
        }
        return Outcome(reward=rewards, metrics=metrics)


def _by_side(step: Step, side: int) -> list[float]:
    """What a step gives to both sides; a single number is of the one that acted."""
    if isinstance(step.reward, list):
        if len(step.reward) != 2:
            raise EpisodeError(f"env_error: step returned {len(step.reward)} rewards for two sides")
        return step.reward
    mine = step.reward or 0.0
    return [mine, 0.0] if side == 0 else [0.0, mine]
