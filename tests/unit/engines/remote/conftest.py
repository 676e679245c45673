"""Remote engines over a service in a thread (`tests/support/fake_service.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from astraflow.engines.remote.engine import RemoteEngine
from astraflow.models.remote.transcript import Transcript
from astraflow.types import Generation, Message, Sampling
from fake_service import FakeService


class Asker:
    """An engine, asked in words."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.engine, self.chat, self._number = engine, Transcript(), 0

    def begin(
        self, text: str | list[Message], sampling: Sampling | None = None, episode: str = "e/1", tools: Any = None,
        sink: Any = None,
    ) -> Future[Generation]:  # fmt: skip
        """Ask for a reply to one message, or to several."""
        self._number += 1
        messages: list[Message] = [{"role": "user", "content": text}] if isinstance(text, str) else text
        ids = self.chat.encode(self.chat.render(messages, tools, add_generation_prompt=True))
        given = Sampling(temperature=0.0) if sampling is None else sampling
        return self.engine.submit(f"{episode}/judge/{self._number}", ids, given, sink)

    def ask(self, text: str | list[Message], sampling: Sampling | None = None, episode: str = "e/1") -> str:
        """The reply, without its end."""
        return self.chat.decode(self.begin(text, sampling, episode).result(60).token_ids)


@pytest.fixture
def service() -> Iterator[FakeService]:
    made = FakeService()
    yield made
    made.close()


@pytest.fixture
def start(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Asker]]:
    """Starts engines that pause for milliseconds only; all are closed at the end."""
    monkeypatch.setattr("astraflow.engines.remote.service._PAUSE_S", 0.002)
    started: list[RemoteEngine] = []

    def make(**options: Any) -> Asker:
        started.append(RemoteEngine("a-model", **{"url": service.url, "deadline_s": 30.0, **options}))
        return Asker(started[-1])

    yield make
    for engine in started:
        engine.close()
