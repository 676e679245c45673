"""An engine that is a server, over a fake of the server, and what a test does to both."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.engines.served.engine import ServedEngine

LIMIT_S = 60.0


class Played:
    """An engine and the server that it talks to."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine

    @property
    def url(self) -> str:
        """Of the server."""
        return str(self.engine._keeper.server._web.url)  # type: ignore[attr-defined]

    def tell(self, what: str, **body: Any) -> Any:
        """Ask the server something that only fakes know."""
        request = urllib.request.Request(f"{self.url}/fake/{what}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)

    def asked(self, kind: str) -> list[Any]:
        """What was asked of it so far."""
        return [entry[1:] for entry in self.tell("seen") if entry[0] == kind]

    def bodies(self) -> list[dict[str, Any]]:
        """Of generations, without those by which an engine looks at a server."""
        return [body for (body,) in self.asked("generate") if body["stream"]]

    def step(self, tokens: int = 2) -> None:
        """Each request in flight gets so many tokens, and they have arrived."""
        self.engine._loop.wait_for(_nothing)  # what was submitted is admitted
        stats = self.engine.stats()
        requests = int(stats["running"] + stats["waiting"])
        self.tell("step", tokens=tokens, requests=requests)
        self.until(lambda: self.engine.stats()["sampled_tokens"] >= stats["sampled_tokens"] + tokens * requests)

    def kill(self) -> None:
        """The server and all its children."""
        os.killpg(self.engine._keeper.host._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.002)

    def until_restarted(self) -> None:
        """It has had one life more, and serves."""
        self.until(lambda: self.engine.stats()["restarts"] == 1 and self.engine._keeper.serving.is_set())


async def _nothing() -> None:
    return


def starts(
    engine: Callable[..., ServedEngine], defaults: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Played]]:
    """For a fixture: starts engines with options, all of which are closed at the end; logs of servers that failed stay
    in `place`."""
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    started: list[ServedEngine] = []

    def make(**options: Any) -> Played:
        started.append(engine(**{"dtype": "float32", "ready_s": LIMIT_S, **defaults, **options}))
        return Played(started[-1])

    yield make
    for each in started:
        each.close()


def script(path: Path, lines: str) -> str:
    """A program of this text; its path."""
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
