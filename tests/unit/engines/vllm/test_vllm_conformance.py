from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.models.load import load_model, state_tensors
from astraflow.testing.engines.suite import EngineCase, EngineSuite


class TestVllm(EngineSuite):
    @pytest.fixture
    def case(self, start: Callable[..., Any], endless_dir: Path) -> EngineCase:
        played = start(args={"fake_held": True})
        return EngineCase(
            engine=played.engine, prompt=[1, 5, 9, 13, 17, 21], long_tokens=300,
            tensors=state_tensors(load_model(endless_dir)), advance=played.step,
            finish=lambda: played.tell("release"),
        )  # fmt: skip
