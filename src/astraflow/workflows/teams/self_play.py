"""A game for two: a player that is trained, against one of a pool of opponents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from astraflow.contracts import LLM, Game
from astraflow.errors import Problem
from astraflow.types import Message, Outcome, Task
from astraflow.workflows.load import factory
from astraflow.workflows.questions import guarded, user
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
        game: str | Mapping[str, Any],
        player: str = "player",
        opponents: Sequence[str] = ("opponent",),
        max_moves: int = 64,
    ) -> None:
        """`game`: as `astraflow.contracts.Game`, one fresh one per episode."""
        if not opponents:
            raise Problem("workflow.opponents", [], "must name at least one policy", f"for example [{player!r}]")
        roles = {"player": player, **{f"opponents.{i}": name for i, name in enumerate(opponents)}}
        super().__init__(roles)
        self._game = factory("environments", game, "workflow.game")
        self._player, self._opponents = player, list(opponents)
        self._max_moves = at_least("max_moves", max_moves, 1, "give the longest game, in moves of both sides")

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        opponent = self._opponents[(task.row + task.epoch) % len(self._opponents)]
        mirror = opponent == self._player
        sides = [f"{name}@{side}" if mirror else name for side, name in enumerate((self._player, opponent))]
        game = cast(Game, guarded(self._game))
        guarded(game.start, task)
        talks: list[list[Message]] = [[], []]
        moves = 0
        while (side := game.turn) is not None and moves < self._max_moves:
            talks[side].append(user(guarded(game.view, side)))
            reply = await llm[sides[side].partition("@")[0]].chat(talks[side], model=sides[side])
            talks[side].append(reply.message)
            guarded(game.move, side, (reply.content or "").strip())
            moves += 1
        scores = [guarded(game.score, side) for side in (0, 1)]
        rewards: dict[str, float | None] = {
            name: score for name, score, talk in zip(sides, scores, talks, strict=True) if talk
        }
        return Outcome(reward=rewards, metrics={"success": float(scores[0] > scores[1]), "moves": float(moves)})
