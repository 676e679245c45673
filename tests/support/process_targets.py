"""What pools of processes run in tests."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any


class Bench:
    """Does as it is told, well or badly."""

    def __init__(self, *, broken: bool = False) -> None:
        if broken:
            raise RuntimeError("no such bench")
        self._kept: dict[str, int] = {}

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()

    def add(self, name: str, number: int) -> int:
        self._kept[name] = self._kept.get(name, 0) + number
        return self._kept[name]

    def hang(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        while True:
            time.sleep(60)

    def burn(self) -> int:
        return len(str(7 ** (7**9)))  # a C call that heeds nobody

    def die(self) -> None:
        os._exit(3)

    def fail(self) -> None:
        raise ValueError("this is wrong")

    def leave(self) -> None:
        raise SystemExit(4)

    def child(self) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    def hold(self, megabytes: int) -> int:
        return len(bytearray(megabytes << 20))

    def talk(self) -> str:
        os.write(1, b"{}\n" * 1000)
        os.write(2, b"noise\n" * 1000)
        return "said"

    def unsendable(self) -> object:
        return object()

    def variables(self) -> dict[str, str]:
        return dict(os.environ)

    def hash(self) -> int:
        return hash("a text")
