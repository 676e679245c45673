from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.models.load import load_model, state_tensors
from astraflow.testing.engines.suite import EngineCase, EngineSuite


class TestSglang(EngineSuite):
    """Held: tokens come when the test says so. After a crash requests go on in another life of the server."""

    @pytest.fixture
    def case(self, start: Callable[..., Any], endless_dir: Path) -> EngineCase:
        played = start(args={"fake_held": True, "fake_spans": True}, deterministic=True)

        def crash() -> None:
            played.kill()
            played.until(lambda: played.engine.stats()["restarts"] == 1 and played.engine._keeper.serving.is_set())

        return EngineCase(
            engine=played.engine, prompt=[1, 5, 9, 13, 17, 21], long_tokens=300,
            tensors=state_tensors(load_model(endless_dir)), advance=played.step, crash=crash, recovers=True,
            finish=lambda: played.tell("release"), tick=lambda: played.tell("step", tokens=12, requests=0),
        )  # fmt: skip
