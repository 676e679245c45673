"""`python -m astraflow.processes.inside <fd>`: makes the target, answers calls until the other side hangs up."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import socket
import sys
import threading
from typing import Any, BinaryIO

import msgspec

from astraflow.errors import place_of
from astraflow.processes.records import Ask, Hello, Told

_PR_SET_PDEATHSIG = 1
_MAX_ANSWER_BYTES = 64 << 20


def main(number: str) -> None:
    """`number`: of the socket's file."""
    _end_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who asks decides when to end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=int(number)) as channel, channel.makefile("rb") as lines:
        hello = msgspec.json.decode(lines.readline(), type=Hello)
        try:
            target = _made(hello)
        except Exception as error:
            channel.sendall(_line(Told(error=_sentence(error))))
            return
        channel.sendall(_line(Told()))
        _answer(target, lines, channel)


def _made(hello: Hello) -> Any:
    module, _, name = hello.target.partition(":")
    made = getattr(importlib.import_module(module), name)(**hello.options)
    if hello.memory_bytes:  # after the imports: libraries reserve what they never use
        resource.setrlimit(resource.RLIMIT_AS, (hello.memory_bytes, hello.memory_bytes))
    return made


def _answer(target: Any, lines: BinaryIO, channel: socket.socket) -> None:
    for line in lines:
        ask = msgspec.json.decode(line, type=Ask)
        try:
            if ask.method.startswith("_"):
                raise AttributeError(f"{ask.method} is private")
            told = _line(Told(value=getattr(target, ask.method)(*ask.arguments)))
            if len(told) > _MAX_ANSWER_BYTES:
                told = _line(Told(error=f"ValueError: an answer of {len(told)} bytes is too long"))
        except (Exception, SystemExit) as error:
            told = _line(Told(error=_sentence(error)))
        channel.sendall(told)


def _line(told: Told) -> bytes:
    return msgspec.json.encode(told) + b"\n"


def _sentence(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}{place_of(error)}"
    return text[:2000].encode("utf-8", "backslashreplace").decode()


def _end_with_the_parent() -> None:
    """On Linux the kernel sees to it, also in the middle of a C call; elsewhere a thread does."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    tick = threading.Event()
    while not tick.wait(0.5):
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
