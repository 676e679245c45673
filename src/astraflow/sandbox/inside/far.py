"""The candidate's functions and objects as a test sees them: each use is a request to the candidate's box."""

from __future__ import annotations

import builtins

from astraflow.sandbox.inside.values import pack, receive, send, unpack

TYPE_CHECKING = False  # typing takes 2 ms to load, in each box
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)


class CandidateError(Exception):
    """What the code raised, when it is no exception of Python's own."""


class Link:
    """The connection to the candidate. `broken`: why it can be used no more, "" while it can."""

    def __init__(self, channel: int, limit: int) -> None:
        self._channel, self._limit, self.broken = channel, limit, ""

    def ask(self, **request: Any) -> Any:
        """The reply as it came.

        Raises: CandidateError: the connection is broken, now and for every later request; what the code raised."""
        if self.broken:
            raise CandidateError(self.broken)
        try:
            send(self._channel, request)
        except OSError:
            self.broken = "died"
            raise CandidateError(self.broken) from None
        try:
            reply = receive(self._channel, self._limit + 4096)
            if not isinstance(reply, dict):
                raise ValueError("not a reply")
        except EOFError:
            self.broken = "died"
        except (ValueError, RecursionError) as error:
            self.broken = "garbage: " + str(error)[:100]
        if self.broken:
            raise CandidateError(self.broken)
        if "raised" in reply:
            raise _raised(str(reply["raised"]), str(reply.get("says", "")))
        return reply

    def value(self, **request: Any) -> Any:
        """The value of the reply. Raises: as `ask`; CandidateError: it has no value."""
        reply = self.ask(**request)
        try:
            return unpack(reply["value"], self._near)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CandidateError("garbage: " + str(error)[:100]) from None

    def call(self, args: tuple[Any, ...], named: dict[str, Any], **whom: Any) -> Any:
        """What the call returned; lists, dicts and sets among `args` become what the code made of them."""
        sent = pack(list(args), self.far)
        reply = self.ask(op="call", args=sent, named=pack(named, self.far), **whom)
        try:
            if "args" in reply:
                for before, after in zip(args, unpack(reply["args"], self._near)):  # noqa: B905 - Python 3.9
                    _become(before, after)
            return unpack(reply["value"], self._near)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CandidateError("garbage: " + str(error)[:100]) from None

    def far(self, value: Any) -> Any:
        if type(value) is Far:
            return {"h": object.__getattribute__(value, "_number")}
        raise TypeError("a test cannot hand a " + type(value).__name__ + " to the code")

    def _near(self, packed: Any) -> Any:
        return Far(self, int(packed["h"]))


class Far:
    """An object of the candidate's. It is equal to itself alone: what it thinks of that is not asked."""

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return self._link.value(op="get", of=self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.value(op="set", of=self._number, name=name, value=pack(value, self._link.far))

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._link.call(args, named, of=self._number)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._link.value(op="items", of=self._number))

    def __getitem__(self, key: Any) -> Any:
        return self._link.value(op="at", of=self._number, value=pack(key, self._link.far))

    def __len__(self) -> int:
        return int(self._link.value(op="len", of=self._number))

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return type(other) is Far and object.__getattribute__(other, "_number") == self._number

    def __hash__(self) -> int:
        return hash(self._number)


class Named:
    """A name that the code should define, to be called."""

    def __init__(self, link: Link, name: str) -> None:
        self._link, self._name = link, name

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._link.call(args, named, name=self._name)


def _raised(name: str, says: str) -> Exception:
    """Never what would end the driver, or a loop of a test: only exceptions of Python's own that are errors."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS_OF_LOOPS):
        try:
            return kind(says)
        except TypeError:
            pass
    return CandidateError(name + ": " + says)


def _become(before: Any, after: Any) -> None:
    if type(before) is not type(after):
        return
    if type(before) is list:
        before[:] = after
    elif type(before) in (dict, set):
        before.clear()
        before.update(after)
