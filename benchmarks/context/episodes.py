"""Episodes as the gateway captures them: calls whose prompts go on from what was said before, and their branches.

| workload | an episode                                                                                               |
|----------|----------------------------------------------------------------------------------------------------------|
| linear   | 12 calls, each prompt is all that was said before and an observation                                     |
| forks    | a history of 4 calls and 2,048 tokens, then 4 calls that go on from it                                   |
| groups   | one call; siblings have the same long prompt                                                             |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from astraflow.models.scoring.packing import TokenRows, rows_from_lists
from astraflow.rollout.context.trie import full_sequence, trajectories
from astraflow.types import Call, Generation

CALLS, HISTORY_CALLS, BRANCHES = 12, 4, 4
HISTORY_TOKENS = 2048


@dataclass(frozen=True)
class Sizes:
    """Tokens of what the episodes of a workload are made of."""

    episodes: int
    prompt: int  # of the first call
    sampled: int  # by each call
    observed: int = 0  # between two calls


@dataclass
class _Agent:
    """Draws random tokens."""

    draw: np.random.Generator
    vocabulary: int

    def tokens(self, count: int) -> np.ndarray:
        return self.draw.integers(3, self.vocabulary, count).astype(np.int32)

    def call(self, index: int, prompt: np.ndarray, sampled: int) -> Call:
        ids = self.tokens(sampled)
        zeros = np.zeros(sampled, np.float32)
        return Call("actor", index, prompt, Generation(ids, zeros, zeros.astype(np.int32), "stop"))

    def linear(self, sizes: Sizes, calls: int) -> list[Call]:
        prompt, done = self.tokens(sizes.prompt), list[Call]()
        for index in range(calls):
            done.append(self.call(index, prompt, sizes.sampled))
            prompt = np.concatenate((prompt, done[-1].generation.token_ids, self.tokens(sizes.observed)))
        return done

    def forks(self, sizes: Sizes) -> list[Call]:
        piece = HISTORY_TOKENS // HISTORY_CALLS
        done = self.linear(Sizes(1, piece - sizes.sampled, sizes.sampled, piece - sizes.sampled), HISTORY_CALLS)
        history = np.concatenate((done[-1].prompt_ids, done[-1].generation.token_ids))
        for _ in range(BRANCHES):
            prompt = np.concatenate((history, self.tokens(sizes.observed)))
            done.append(self.call(len(done), prompt, sizes.sampled))
        return done


def episodes(workload: str, sizes: Sizes, vocabulary: int) -> list[list[Call]]:
    """The same numbers in every process."""
    agent = _Agent(np.random.default_rng(0), vocabulary)
    if workload == "linear":
        return [agent.linear(sizes, CALLS) for _ in range(sizes.episodes)]
    if workload == "forks":
        return [agent.forks(sizes) for _ in range(sizes.episodes)]
    prompt = agent.tokens(sizes.prompt)
    return [[agent.call(0, prompt, sizes.sampled)] for _ in range(sizes.episodes)]


def one_per_call(played: Iterable[list[Call]]) -> TokenRows:
    """Every call is a row of its own: its prompt, and what it sampled."""
    return _rows([[call] for calls in played for call in calls])


def one_per_branch(played: Iterable[list[Call]]) -> TokenRows:
    """Every branch of an episode's trie is a row: its whole path, of which its own tokens are trained."""
    return _rows(played)


def _rows(tries: Iterable[list[Call]]) -> TokenRows:
    examples = []
    for calls in tries:
        branches = trajectories(calls, "actor")
        for branch in branches:
            path = full_sequence(branches, branch.branch)
            trained = np.zeros(len(path), dtype=bool)
            trained[branch.fork_at :] = branch.loss_mask
            examples.append((path, trained))
    return rows_from_lists(examples)
