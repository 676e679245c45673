"""The driver's box: runs tests against code that is in another box. One process stays; each job gets a fork of it."""

from __future__ import annotations

import gc
import os
import resource
import socket

from astraflow.sandbox.inside.far import CandidateError, Link, Named
from astraflow.sandbox.inside.values import compiled, new_module, receive, send

TYPE_CHECKING = False  # typing takes 2 ms to load, in each box
if TYPE_CHECKING:
    from typing import Any


_TOLERANCE = 1e-6
_WHY_CHARS = 300  # the code has a say in it; what is too long for the host would be a failure of the sandbox


def same_output(wrote: str, wanted: str) -> bool:
    """Line by line without white space at the ends; else word by word, where decimal numbers may differ by 1e-6."""
    got, want = ([line.rstrip() for line in text.strip().splitlines()] for text in (wrote, wanted))
    if got == want:
        return True
    words, wished = wrote.split(), wanted.split()
    return len(words) == len(wished) and all(map(_same_word, words, wished))


def _same_word(word: str, wished: str) -> bool:
    if word == wished:
        return True
    if not any(c in wished for c in ".eE"):
        return False
    try:
        got, want = float(word), float(wished)
    except ValueError:
        return False
    return abs(got - want) <= _TOLERANCE * max(1.0, abs(want))


def _test(link: Link, space: dict[str, Any], test: str) -> str:
    """Why the test failed, or ""."""
    try:
        exec(compiled(test, "test.py"), space)  # noqa: S102 - what the box is for
    except Exception as error:
        why = str(error)
        return link.broken or (type(error).__name__ + (": " + why[:200] if why else ""))
    except BaseException as error:
        return type(error).__name__
    return link.broken  # a test that swallowed it did not pass


def _case(link: Link, code: str, given: str, wanted: str) -> str:
    try:
        reply = link.ask(op="program", code=code, input=given)
    except CandidateError as error:
        return link.broken or str(error)
    if reply.get("signal"):
        return "signal " + str(reply["signal"])
    if reply.get("code"):
        last = str(reply.get("says", "")).strip().splitlines()[-1:]
        return "exit " + str(reply["code"]) + (": " + last[0] if last else "")
    return "" if same_output(str(reply.get("wrote", "")), wanted) else "wrong output"


def _judge(control: int, job: Any, channel: int) -> None:
    link = Link(channel, job["limit"])
    stop = job["stop"]

    def tell(why: str) -> bool:
        send(control, {"why": why[:_WHY_CHARS]})
        return bool(why) and (stop or why.startswith("signal "))

    for given, wanted in job["cases"]:
        if tell(_case(link, job["code"], given, wanted)):
            return
    if not job["tests"]:
        return
    try:
        link.ask(op="load", code=job["code"])
    except Exception as error:
        tell("load: " + (link.broken or type(error).__name__ + ": " + str(error)[:200]))
        return
    space = new_module("tests")
    entries = {name: Named(link, name) for name in job["entries"]}
    try:
        exec(compiled(job["setup"], "setup.py"), space)  # noqa: S102 - trusted, or this box is thrown away
        space.update(entries)
        exec(compiled(job["given"], "given.py"), space)  # noqa: S102 - the same
    except Exception as error:
        tell("setup: " + type(error).__name__ + ": " + str(error)[:200])
        return
    for test in job["tests"]:
        if tell(_test(link, space, test)):
            return


def _take(control: socket.socket) -> tuple[Any, int]:
    """The next job, and the candidate's socket that comes with it."""
    _, files, _, _ = socket.recv_fds(control, 1, 1)
    if not files:
        raise EOFError("no more jobs")
    return receive(control.fileno()), files[0]


def _fork(control: int, job: Any, channel: int) -> int:
    pid = os.fork()
    if not pid:
        try:
            seconds = int(job["cpu_s"])
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            _judge(control, job, channel)
        finally:
            os._exit(0)
    os.close(channel)
    return pid


def main(channel: int, limit: int) -> None:
    """`limit` is for the other program."""
    control = socket.socket(fileno=channel)
    send(channel, {"ready": os.getpid()})
    gc.freeze()
    while True:
        try:
            job, candidate = _take(control)
        except EOFError:
            return
        _, status = os.waitpid(_fork(channel, job, candidate), 0)
        send(channel, {"end": status})
