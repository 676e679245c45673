"""What an episode does: its calls with their tokens and delays, the same in every simulation of a seed."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from astraflow.simulate.profile import Call, EpisodeShape


class Planned(NamedTuple):
    """One call."""

    policy: str
    tokens: int
    prompt_tokens: float
    delay_s: float


class Episodes:
    """Drawn by group: simulations with other settings play the same ones. `most`: tokens of a call of each policy."""

    def __init__(self, shape: EpisodeShape, most: dict[str, int], group_size: int, seed: int) -> None:
        self._shape, self._most, self._size, self._seed = shape, most, group_size, seed
        self._groups: dict[int, list[list[Planned]]] = {}

    def of(self, group: int, sibling: int) -> list[Planned]:
        """The calls of one episode, at least one."""
        if group not in self._groups:
            self._groups[group] = self._draw(np.random.default_rng((self._seed, 0, group)))
        return self._groups[group][sibling]

    def forget(self, group: int) -> None:
        """It is complete."""
        self._groups.pop(group, None)

    def _draw(self, random: np.random.Generator) -> list[list[Planned]]:
        whole = math.floor(self._shape.rounds)
        more = self._shape.rounds - whole
        episodes = []
        for _ in range(self._size):
            rounds = whole + (random.random() < more if more else 0)
            calls = [
                Planned(call.policy, self._tokens(call, random), call.prompt_tokens,
                        _drawn(call.delay_s, call.delay_spread, random))
                for _ in range(rounds) for call in self._shape.calls
                if call.chance >= 1 or random.random() < call.chance
            ]  # fmt: skip
            first = self._shape.calls[0]
            episodes.append(calls or [Planned(first.policy, self._tokens(first, random), first.prompt_tokens, 0.0)])
        return episodes

    def _tokens(self, call: Call, random: np.random.Generator) -> int:
        drawn = _drawn(call.tokens, call.spread, random)
        whole = math.floor(drawn)
        rounded = whole + (random.random() < drawn - whole if drawn > whole else 0)  # keeps the mean
        return max(1, min(rounded, self._most.get(call.policy, rounded)))


def _drawn(mean: float, spread: float, random: np.random.Generator) -> float:
    if not spread or not mean:
        return mean
    return float(mean * math.exp(spread * random.standard_normal() - spread * spread / 2))
