"""What a runner and those who play for it are to each other: `rollout.pool` here, `rollout.swarm.pool` elsewhere."""

from __future__ import annotations

from typing import Protocol

from astraflow.rollout.worker.channel import Ask, Channel
from astraflow.types import EpisodeLease, Outcome


class Player(Protocol):
    """One episode as the pool sees it."""

    key: str
    lease: EpisodeLease
    timeout_s: float

    def asked(self, ask: Ask, channel: Channel) -> None:
        """A call came; its Answer goes to `channel`."""

    def dropped(self, call: int) -> None:
        """The workflow no longer waits for this call."""

    def ended(self, outcome: Outcome | None, error: str | None, code: str = "") -> str | None:
        """It is over; `code`: version of the code that played it. Gives the error that it is kept with."""

    def given_back(self, *, lost: bool) -> None:
        """Nothing of it is kept, its lease goes back; `lost`: that counts towards workflow.max_attempts."""


class Pool(Protocol):
    """Who plays. Of each player that it took, exactly one of `ended` and `given_back` is called, once."""

    def takes(self, player: Player) -> bool:
        """It can take this player now."""

    def place(self, player: Player) -> int:
        """Play it; returns its slot. Only right after `takes`. Raises: WireError: its task cannot be sent."""

    def stop(self, slot: int) -> None:
        """It is not wanted any more; its end follows."""

    def fail(self, slot: int, error: str) -> None:
        """Its time is over: it ends with this error, now or within the time that its worker has for that."""
