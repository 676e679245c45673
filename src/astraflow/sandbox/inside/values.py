"""Plain values as JSON, and frames of JSON on a socket: all that crosses from the candidate to its driver."""

from __future__ import annotations

import builtins
import os
import sys
from _json import encode_basestring_ascii, make_encoder, make_scanner  # json itself takes 7 ms to load, in each box

TYPE_CHECKING = False  # typing takes 2 ms to load, in each box
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_EXACT = 1 << 53
MAX_FRAME = 64 << 20


def pack(value: Any, far: Callable[[Any], Any]) -> Any:
    """`value` as JSON; `far` makes something of a value that is not plain. Subclasses become their plain base."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        whole = int.__index__(value)
        return whole if -_EXACT < whole < _EXACT else {"i": hex(whole)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [pack(item, far) for item in value]
    if isinstance(value, dict):
        return {"d": [[pack(key, far), pack(item, far)] for key, item in value.items()]}
    for kind, mark in ((tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return {mark: [pack(item, far) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, type) and vars(builtins).get(type.__getattribute__(value, "__name__")) is value:
        return {"y": type.__getattribute__(value, "__name__")}
    return far(value)


def unpack(packed: Any, near: Callable[[Any], Any]) -> Any:
    """Inverse of `pack`; `near` makes something of what `far` made. Raises: ValueError or TypeError: not made by it."""
    if isinstance(packed, list):
        return [unpack(item, near) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) != 1:
        raise ValueError("not a value")
    ((mark, inner),) = packed.items()
    if mark == "d":
        return {unpack(key, near): unpack(item, near) for key, item in inner}
    if mark in _MAKERS:
        return _MAKERS[mark](unpack(item, near) for item in inner)
    if mark == "i":
        return int(inner, 16)
    if mark == "b":
        return bytes.fromhex(inner)
    if mark == "c":
        return complex(*inner)
    if mark == "y" and isinstance(getattr(builtins, inner, None), type):
        return getattr(builtins, inner)
    return near(packed)


_MAKERS: dict[str, Callable[[Any], Any]] = {"t": tuple, "s": set, "z": frozenset}


class _Plain:
    """How the parser of json makes values of numbers and constants."""

    strict = False
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.__getitem__


def _refuse(value: Any) -> Any:
    raise TypeError("a " + type(value).__name__ + " is no plain value")


_write = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
_read = make_scanner(_Plain())  # type: ignore[arg-type]


def compiled(code: str, name: str) -> Any:
    """As if it were a file: what this one imports from `__future__` is not meant for it."""
    return compile(code, name, "exec", dont_inherit=True)


def new_module(name: str) -> dict[str, Any]:
    """Its names; known to those who look for the module of a class, such as `dataclasses`."""
    module = sys.modules[name] = type(sys)(name)
    return module.__dict__


def send(channel: int, message: Any, limit: int = MAX_FRAME) -> None:
    """Raises: ValueError: longer than `limit` bytes."""
    body = "".join(_write(message, 0)).encode()
    if len(body) > limit:
        raise ValueError("longer than " + str(limit) + " bytes")
    rest = memoryview(len(body).to_bytes(4, "big") + body)
    while rest:
        rest = rest[os.write(channel, rest) :]


def receive(channel: int, limit: int = MAX_FRAME) -> Any:
    """The next message. Raises: EOFError: the other side is gone; ValueError: it is no message or too long."""
    size = int.from_bytes(_exactly(channel, 4), "big")
    if size > limit:
        raise ValueError("longer than " + str(limit) + " bytes")
    text = _exactly(channel, size).decode()
    try:
        found, end = _read(text, 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("more than JSON")
    return found


def _exactly(channel: int, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = os.read(channel, min(size, 1 << 20))
        except OSError as error:
            raise EOFError("the connection broke") from error
        if not part:
            raise EOFError("the connection ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
