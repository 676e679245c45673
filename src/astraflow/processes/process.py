"""One process as its pool sees it: started, asked, killed. Everything here blocks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from astraflow.processes.records import Ask, CallFailed, Hello, Told

_PIECE = 1 << 16


class Process:
    """A process that makes its target. It ends with the thread that started it, or by `end`."""

    def __init__(self, hello: Hello, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "astraflow.processes.inside", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=dict(environment), start_new_session=True,
            )  # fmt: skip
        self._channel, self._rest, self._hello = ours, b"", hello

    def ready(self, within_s: float) -> None:
        """Wait for its target. Raises: CallFailed: "start"; only `end` is left to do."""
        name = self._hello.target
        try:
            told = self._exchange(msgspec.json.encode(self._hello), within_s, f"{name} was not ready")
        except CallFailed as error:
            raise CallFailed("start", str(error)) from error
        if told.error:
            raise CallFailed("start", f"{name}: {told.error}")

    def call(self, ask: Ask, deadline_s: float) -> Any:
        """Raises: CallFailed: after "deadline" and "lost" only `end` is left to do; after "raised" it goes on."""
        try:
            line = msgspec.json.encode(ask)
        except (TypeError, UnicodeEncodeError) as error:
            raise CallFailed("raised", f"the arguments of {ask.method} are no JSON ({error})") from error
        told = self._exchange(line, deadline_s, f"{ask.method} gave nothing")
        if told.error:
            raise CallFailed("raised", told.error)
        return told.value

    def end(self) -> None:
        """Kill it and what it started in its session; nothing of it stays."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()

    def _exchange(self, line: bytes, within_s: float, what: str) -> Told:
        until = time.monotonic() + within_s
        try:
            self._channel.settimeout(within_s)
            self._channel.sendall(line + b"\n")
            pieces = [self._rest]
            while b"\n" not in pieces[-1]:
                self._channel.settimeout(max(1e-3, until - time.monotonic()))
                piece = self._channel.recv(_PIECE)
                if not piece:
                    raise CallFailed("lost", f"{what}: its process ended{self._status()}")
                pieces.append(piece)
                if time.monotonic() > until:
                    raise TimeoutError
        except TimeoutError as error:
            raise CallFailed("deadline", f"{what} within {within_s:g} s") from error
        except OSError as error:
            raise CallFailed("lost", f"{what}: its process ended{self._status()} ({error})") from error
        answer, _, self._rest = b"".join(pieces).partition(b"\n")
        try:
            return msgspec.json.decode(answer, type=Told)
        except msgspec.DecodeError as error:
            raise CallFailed("lost", f"{what}: its process sent garbage ({error})") from error

    def _status(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(0.5)
            return f" by signal {-status}" if status < 0 else f" (exit {status})"
        return ""
