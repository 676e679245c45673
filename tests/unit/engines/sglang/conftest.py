"""SGLang engines over a process that speaks as SGLang does (`tests/support/fake_sglang.py`)."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_sglang
from astraflow.engines.sglang.engine import SglangEngine

LIMIT_S = 60.0


class Played:
    """An engine and the server that it talks to."""

    def __init__(self, engine: SglangEngine) -> None:
        self.engine = engine

    @property
    def url(self) -> str:
        """Of the server."""
        return str(self.engine._keeper.server._web.url)  # type: ignore[attr-defined]

    def tell(self, what: str, **body: Any) -> Any:
        """Ask the server something that is not of SGLang."""
        request = urllib.request.Request(f"{self.url}/fake/{what}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)

    def asked(self, kind: str) -> list[Any]:
        """What was asked of it so far."""
        return [entry[1:] for entry in self.tell("seen") if entry[0] == kind]

    def bodies(self) -> list[dict[str, Any]]:
        """Of generations, without the token that shows which logprobs the server says."""
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


async def _nothing() -> None:
    return


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose environment has SGLang, as far as an engine can see."""
    place = tmp_path_factory.mktemp("venv")
    package, about = place / "modules" / "sglang", place / "modules" / "sglang-0.5.23.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import fake_sglang\nif __name__ == '__main__':\n    fake_sglang.main()\n"
    )
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    path = place / "python"
    support = Path(fake_sglang.__file__).parent
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{place / "modules"}:{support}" exec {sys.executable} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def start(
    python: str, endless_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Played]]:
    """Starts engines; all are closed at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of servers that failed stay
    started: list[SglangEngine] = []

    def make(**options: Any) -> Played:
        settings = {"model_dir": endless_dir, "python": python, "dtype": "float32", "ready_s": LIMIT_S, **options}
        started.append(SglangEngine(**settings))
        return Played(started[-1])

    yield make
    for engine in started:
        engine.close()
