"""vLLM engines over a process that speaks as vLLM does (`tests/support/fake_vllm.py`)."""

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

import fake_vllm
from astraflow.engines.vllm.engine import VllmEngine

LIMIT_S = 60.0


class Played:
    """An engine and the server that it talks to."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine

    def tell(self, what: str, **body: Any) -> Any:
        """Ask the server something that is not of vLLM."""
        url = f"{self.engine._keeper.server._web.url}/fake/{what}"  # type: ignore[attr-defined]
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=LIMIT_S) as answer:
            return json.load(answer)

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
    """An interpreter whose environment has vLLM, as far as an engine can see."""
    path = tmp_path_factory.mktemp("venv") / "python"
    found = json.dumps({"version": "0.32.0", "plugin": True})
    path.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{found}'; exit; fi\n"
        f'[ "$2" = astraflow.engines.vllm.inside.serve ] || exit 3\nshift 2\n'
        f'exec {sys.executable} {fake_vllm.__file__} "$@"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def start(
    python: str, endless_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Played]]:
    """Starts engines; all are closed at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of servers that failed stay
    started: list[VllmEngine] = []

    def make(**options: Any) -> Played:
        settings = {"model_dir": endless_dir, "python": python, "dtype": "float32", "ready_s": LIMIT_S, **options}
        started.append(VllmEngine(**settings))
        return Played(started[-1])

    yield make
    for engine in started:
        engine.close()
