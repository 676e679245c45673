"""The candidate's box: runs code that nobody trusts and answers calls of its functions. It knows no test.

Whatever the code does to this process, all that leaves it are values that the driver compares.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from astraflow.sandbox.inside.values import compiled, new_module, pack, receive, send, unpack

TYPE_CHECKING = False  # typing takes 2 ms to load, in each box
if TYPE_CHECKING:
    from typing import Any


MAX_ITEMS = 100_000  # of an iterator that is asked for its items
_ERROR_CHARS = 200


class _Candidate:
    """The names that the code defined, and those of its objects that the driver holds on to."""

    def __init__(self, channel: int, limit: int) -> None:
        self._channel, self._limit = channel, limit
        self._space = new_module("solution")
        self._held: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self) -> None:
        while True:
            try:
                request = receive(self._channel)
            except EOFError:
                return
            try:
                reply = self._answer(request)
                send(self._channel, reply, self._limit)
            except BaseException as error:  # also sys.exit: the code's failure is its answer
                send(self._channel, {"raised": type(error).__name__, "says": _says(error)})

    def _answer(self, request: Any) -> Any:
        kind = request["op"]
        if kind == "load":
            exec(compiled(request["code"], "solution.py"), self._space)  # noqa: S102 - what the box is for
            return {"value": None}
        if kind == "program":
            return _program(self._channel, request["code"], request["input"])
        target: Any = self._held[request["of"]] if "of" in request else self._named(request["name"])
        if kind == "call":
            return self._call(target, request)
        if kind == "get":
            return {"value": self._pack(getattr(target, request["name"]))}
        if kind == "set":
            setattr(target, request["name"], unpack(request["value"], self._near))
            return {"value": None}
        if kind == "items":
            return {"value": self._pack([item for item, _ in zip(target, range(MAX_ITEMS))])}  # noqa: B905 - Python 3.9
        if kind == "at":
            return {"value": self._pack(target[unpack(request["value"], self._near)])}
        if kind == "len":
            return {"value": len(target)}
        raise ValueError(kind)

    def _call(self, target: Any, request: Any) -> Any:
        args, named = unpack(request["args"], self._near), unpack(request["named"], self._near)
        result = self._pack(target(*args, **named))
        after = pack(args, self._far)  # arguments that the code changed in place are seen by the test, too
        return {"value": result} if after == request["args"] else {"value": result, "args": after}

    def _named(self, name: str) -> Any:
        if name not in self._space and "Solution" in self._space:
            return getattr(self._space["Solution"](), name)
        if name not in self._space:
            raise NameError("the code defines no " + name)
        return self._space[name]

    def _pack(self, value: Any) -> Any:
        return pack(value, self._far)

    def _far(self, value: Any) -> Any:
        number = self._numbers.setdefault(id(value), len(self._held))  # held, so that its id stays its own
        if number == len(self._held):
            self._held.append(value)
        return {"h": number}

    def _near(self, packed: Any) -> Any:
        return self._held[packed["h"]]


def _says(error: BaseException) -> str:
    try:
        return str(error)[:_ERROR_CHARS]
    except BaseException:
        return ""


def _program(channel: int, code: str, given: str) -> Any:
    """Run the code as a program of its own: what it wrote, and how it ended."""
    names = ["astraflow-in", "astraflow-out", "astraflow-err"]
    with open(names[0], "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(given)
    pid = os.fork()
    if not pid:
        _become_program(channel, code, names)
    _, status = os.waitpid(pid, 0)
    if os.getpid() == 1:  # of its own pid namespace: what the program left behind
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wrote, says = map(_text, names[1:])
    ended = {"code": os.WEXITSTATUS(status), "signal": os.WTERMSIG(status)}
    return {"wrote": wrote, "says": says[-_ERROR_CHARS:], **ended}


def _text(name: str) -> str:
    with open(name, "rb") as file:
        return file.read().decode("utf-8", "replace")


def _become_program(channel: int, code: str, names: list[str]) -> None:
    import traceback

    ended = 1
    try:
        os.close(channel)
        for number, name in enumerate(names):
            file = os.open(name, os.O_RDONLY if not number else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
            os.close(file)
        sys.argv = ["solution.py"]
        exec(compiled(code, "solution.py"), new_module("__main__"))  # noqa: S102 - what the box is for
        ended = 0
    except SystemExit as leaving:
        ended = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc(limit=-1)
    finally:
        try:
            _finish()
        except BaseException:
            ended = ended or 1
        os._exit(ended & 255)


def _finish() -> None:
    """What the interpreter does at the end of a program: wait for threads, call what waits for the end, write."""
    import atexit

    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        if file is not None and not getattr(file, "closed", False):
            file.flush()


def main(channel: int, limit: int) -> None:
    """`limit`: bytes of one answer."""
    send(channel, {"ready": os.getpid()})
    gc.freeze()
    _Candidate(channel, limit).serve()
