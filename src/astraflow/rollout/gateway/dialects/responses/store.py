"""The responses of one episode: for `previous_response_id`, item references, and those who ask for one again."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import ChatCompletion
from astraflow.rollout.gateway.dialects.responses.records import ResponseRecord
from astraflow.types import Message


class Stored:
    """A response and the messages that it added to those of the response before it."""

    __slots__ = ("_before", "_messages", "response", "task")

    def __init__(self, response: ResponseRecord, before: Stored | None, messages: list[Message]) -> None:
        """`messages`: of the input."""
        self.response = response
        self.task: asyncio.Task[None] | None = None  # what makes it, in the background
        self._before, self._messages = before, messages

    def answer(self, completion: ChatCompletion) -> None:
        """The reply is there."""
        self._messages = [*self._messages, msgspec.to_builtins(completion.choices[0].message)]

    def history(self) -> list[Message]:
        """All messages, from the first response on."""
        own: list[list[Message]] = []
        at: Stored | None = self
        while at is not None:
            own.append(at._messages)
            at = at._before
        return [message for messages in reversed(own) for message in messages]


class ResponseStore:
    """Ends with its episode."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}
        self._owners: dict[str, Stored] = {}  # of each output item

    def keep(self, stored: Stored) -> None:
        """Until it is deleted."""
        self._stored[stored.response.id] = stored
        for item in stored.response.output:
            self._owners[item.id] = stored

    def get(self, response_id: str) -> Stored:
        """Raises: GatewayError: there is none (404)."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise GatewayError(
                "response_id", response_id, "is not a response of this episode", "ask for one that was stored", 404
            )  # fmt: skip
        return stored

    def previous(self, response_id: str | None) -> Stored | None:
        """What a new response continues.

        Raises: GatewayError: there is none, or it has no answer.
        """
        if response_id is None:
            return None
        stored = self._stored.get(response_id)
        if stored is None:
            raise GatewayError(
                "previous_response_id", response_id, "is not a response of this episode",
                "send the whole input, or leave store as it is", 400, "previous_response_not_found",
            )  # fmt: skip
        if stored.response.status not in ("completed", "incomplete"):
            raise GatewayError(
                "previous_response_id", response_id, f"has no answer ({stored.response.status})", "wait for one"
            )  # fmt: skip
        return stored

    def item(self, item_id: str) -> dict[str, Any] | None:
        """An output item, as the agent got it."""
        owner = self._owners.get(item_id)
        items = owner.response.output if owner is not None else ()
        found: list[dict[str, Any]] = [msgspec.to_builtins(item) for item in items if item.id == item_id]
        return found[0] if found else None

    def delete(self, response_id: str) -> None:
        """Forget a response; those that continue it stay whole.

        Raises: GatewayError: there is none (404).
        """
        stored = self.get(response_id)
        if stored.task is not None:
            stored.task.cancel()
        del self._stored[response_id]
        for item in stored.response.output:
            self._owners.pop(item.id, None)
