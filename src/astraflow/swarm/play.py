"""One episode in the hands of a client."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec

from astraflow.errors import EpisodeError, WireError
from astraflow.types import Outcome, Purpose, Task
from astraflow.wire.messages import Ok
from astraflow.wire.swarm.messages import Abort, Fail, Finish, FinishReply, PlayLease
from astraflow.wire.swarm.outcome import outcome_of, plain_text

R = TypeVar("R")
log = logging.getLogger(__name__)


class Lost(WireError):
    """The episode is not ours any more (given back after silence, cancelled, over); says why."""


class RunOver(WireError):
    """The run has no episodes any more."""


class Door(Protocol):
    """What a play needs of its `Swarm`."""

    client: str
    code: str

    def ask(self, path: str, body: msgspec.Struct, reply: type[R]) -> R:
        """An answer of the door. Raises: Lost, RunOver, WireError."""

    def forget(self, play: Play) -> None:
        """It is over."""


class Play:
    """An episode to play: its calls go to `base_url` with `api_key`, model = one of `policies`; then `finish` it.

    As a context manager it is never left open: an exception inside is logged and kept as the episode's error, a block
    that ends without a word is one too, and Ctrl-C or an exit of the program gives the episode back.
    """

    def __init__(self, door: Door, lease: PlayLease, base_url: str) -> None:
        self.episode_id: str = lease.episode_id
        self.attempt: int = lease.attempt
        self.task: Task = lease.task  # task["question"] reads a field
        self.purpose: Purpose = lease.purpose  # "eval": a held-out task, played as any other
        self.timeout_s: float = lease.timeout_s  # counted from the lease
        self.base_url: str = base_url  # ends with /v1
        self.api_key: str = lease.api_key
        self.policies: list[str] = lease.policies
        self.cancelled = False  # the run does not want it any more; nothing of it will be kept
        self.over = False
        self._door = door

    def finish(
        self,
        reward: object,
        *,
        rewards_per_call: Mapping[str, Sequence[float]] | Sequence[float] = (),
        metrics: Mapping[str, float] | None = None,
        code: str = "",
    ) -> str | None:
        """Hand it in. `reward`: a number, {policy: number}, an `Outcome`, or None: unscored, in no baseline.

        Gives the error that it is kept with, None when it counts (an episode without one answered call does not).
        Raises: EpisodeError: the reward is none; the episode goes on. Lost: it is not ours any more.
        """
        outcome = reward if isinstance(reward, Outcome) else Outcome(
            reward=reward, rewards_per_call=rewards_per_call or {}, metrics=dict(metrics or {})  # type: ignore[arg-type]
        )  # fmt: skip
        outcome = outcome_of(outcome)
        unset = msgspec.UNSET
        many = isinstance(outcome.reward, dict)
        body = Finish(
            client=self._door.client, attempt=self.attempt, code=code or self._door.code,
            reward=unset if many else outcome.reward,  # type: ignore[arg-type]
            rewards=outcome.reward if many else unset,  # type: ignore[arg-type]
            rewards_per_call=outcome.rewards_per_call or unset, metrics=outcome.metrics,
        )  # fmt: skip
        return self._end("finish", body, FinishReply).error

    def fail(self, error: str, *, code: str = "") -> None:
        """It failed: kept as an error, never as a reward of zero. "<kind>: <message>" is counted by its kind."""
        text = plain_text(error or "workflow: failed without a word")
        body = Fail(client=self._door.client, attempt=self.attempt, error=text, code=code or self._door.code)
        self._end("fail", body, FinishReply)

    def abort(self) -> None:
        """Do not play it: nothing is kept, it is offered again at once. Again, or too late: nothing happens."""
        if not self.over:
            try:
                self._end("abort", Abort(client=self._door.client, attempt=self.attempt), Ok)
            except (Lost, RunOver):
                return

    def _end(self, what: str, body: msgspec.Struct, reply: type[R]) -> R:
        try:
            said = self._door.ask(f"/swarm/episodes/{self.episode_id}/{what}", body, reply)
        except (Lost, RunOver):
            self._close()
            raise
        self._close()
        return said

    def _close(self) -> None:
        self.over = True
        self._door.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is not None and not isinstance(error, Exception):  # Ctrl-C, an exit
            self.abort()
            return False
        if isinstance(error, Lost | RunOver):
            log.info("%s: %s", self.episode_id, error)
        elif isinstance(error, WireError):  # the door does not answer: the next lease says so
            log.warning("%s: %s", self.episode_id, error)
        elif error is not None:
            log.error("%s failed", self.episode_id, exc_info=error)
        if not self.over:
            self._say(error)
        return True

    def _say(self, error: BaseException | None) -> None:
        if error is None:
            text = "reward: the block ended without one; call play.finish"
        elif isinstance(error, EpisodeError):
            text = plain_text(error)
        else:
            text = plain_text(f"workflow: {type(error).__name__}: {plain_text(error)}")
        try:
            self.fail(text)
        except WireError as problem:
            log.info("%s: %s", self.episode_id, problem)
