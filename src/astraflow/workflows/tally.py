"""What an episode in an environment adds up to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from astraflow.errors import EpisodeError
from astraflow.types import Action, Outcome, Step


class Tally:
    """Rewards of one side by turn, and the metrics of the steps."""

    def __init__(self) -> None:
        self.turns: list[float] = []  # rewards of each reply
        self.metrics: dict[str, float] = {}
        self.done = self.unscored = False

    def turn(self) -> int:
        """A reply came; its number, from 1."""
        self.turns.append(0.0)
        return len(self.turns)

    def add(self, step: Step) -> None:
        """A step of the newest reply. Raises: EpisodeError: its rewards are of several sides."""
        if isinstance(step.reward, list):
            raise EpisodeError("env_error: step returned rewards of several sides; this workflow plays one")
        if step.reward is None:
            self.unscored = True
        else:
            self.turns[-1] += step.reward
        self.metrics.update(step.metrics)
        self.done = self.done or step.done

    @property
    def reward(self) -> float | None:
        """Of the whole episode."""
        return None if self.unscored else float(sum(self.turns))

    def outcome(self, policy: str | None = None) -> Outcome:
        """With rewards per call of `policy`, or of the only one. Not done: a budget cut it, `truncated`."""
        reward = self.reward
        success = float(self.done and reward is not None and reward >= 1)
        metrics = {
            "success": success,
            **self.metrics,
            "turns": float(len(self.turns)),
            "truncated": float(not self.done),
        }
        if reward is None:
            return Outcome(metrics=metrics)
        return Outcome(
            reward=reward, rewards_per_call=self.turns if policy is None else {policy: self.turns}, metrics=metrics
        )


class Budget:
    """What an episode may use: replies, sampled tokens, seconds, tokens of the context. 0: no limit."""

    def __init__(self, turns: int, tokens: int, wall_s: float, context: int = 0) -> None:
        self._turns, self._tokens, self._wall_s, self._context = turns, tokens, wall_s, context
        self._began = time.monotonic()
        self._used = self._replies = self._read = 0

    @property
    def spent(self) -> bool:
        """Nothing is left of one of them."""
        late = 0 < self._wall_s <= time.monotonic() - self._began
        used = ((self._turns, self._replies), (self._tokens, self._used), (self._context, self._read))
        return late or any(0 < most <= spent for most, spent in used)

    def options(self) -> dict[str, Any]:
        """Of the next call."""
        return {"max_tokens": self._tokens - self._used} if self._tokens else {}

    def replied(self, usage: Mapping[str, Any]) -> None:
        """A reply came."""
        self._replies += 1
        self._used += int(usage.get("completion_tokens") or 0)
        self._read = int(usage.get("total_tokens") or 0)


def actions_of(reply: Any, turn: int) -> list[tuple[Action, str | None]]:
    """What a reply does, each with the id of its tool call: the calls, else its text."""
    if not reply.tool_calls:
        return [(Action(text=reply.content or "", finish_reason=reply.finish_reason, turn=turn), None)]
    return [
        (
            Action(
                text=reply.content or "", tool=call.name, arguments=dict(call.arguments),
                finish_reason=reply.finish_reason, turn=turn,
            ),
            call.id,
        )
        for call in reply.tool_calls
    ]  # fmt: skip
