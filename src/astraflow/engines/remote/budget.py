"""How much a service may be asked: by a node, and by one episode."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from astraflow.errors import EngineError

_KEPT_EPISODES = 4096  # the counts of older ones are forgotten, as they are over


@dataclass(frozen=True, kw_only=True)
class Limits:
    """0: none."""

    node_requests: int = 0
    node_tokens: int = 0
    episode_requests: int = 0
    episode_tokens: int = 0


class Spent(EngineError):
    """A budget is used up. `whole`: that of the node, so that nothing more can be asked."""

    def __init__(self, thing: str, value: object, rule: str, fix: str, *, whole: bool = False) -> None:
        self.whole = whole
        super().__init__(thing, value, rule, fix)


class Budget:
    """Counts what is asked and what it took. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = self.tokens = 0
        self._episodes: OrderedDict[str, list[int]] = OrderedDict()  # requests, tokens

    def ask(self, episode: str) -> None:
        """One more request. Raises: Spent: it would be beyond a budget; it is not counted then."""
        limits, own = self._limits, self._of(episode)
        if limits.node_requests and self.requests >= limits.node_requests:
            raise _spent("node_requests", limits.node_requests)
        if limits.node_tokens and self.tokens >= limits.node_tokens:
            raise _spent("node_tokens", limits.node_tokens)
        if limits.episode_requests and own[0] >= limits.episode_requests:
            raise _spent("episode_requests", limits.episode_requests)
        if limits.episode_tokens and own[1] >= limits.episode_tokens:
            raise _spent("episode_tokens", limits.episode_tokens)
        self.requests += 1
        own[0] += 1

    def took(self, episode: str, tokens: int) -> None:
        """What the service counted for a request, prompt and reply."""
        self.tokens += tokens
        self._of(episode)[1] += tokens

    def _of(self, episode: str) -> list[int]:
        own = self._episodes.pop(episode, None) or [0, 0]
        self._episodes[episode] = own
        if len(self._episodes) > _KEPT_EPISODES:
            self._episodes.popitem(last=False)
        return own


def _spent(name: str, limit: int) -> Spent:
    whole = name.startswith("node")
    what = "this node has asked for all that it may" if whole else "the episode has asked for all that it may"
    return Spent(
        f"engine.{name}", limit, f"is used up: {what}", "raise it, or let the workflow ask less", whole=whole
    )  # fmt: skip
