from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.engines.local import LocalEngine
from astraflow.engines.scripted import ScriptedEngine
from astraflow.models.load import load_model, state_tensors
from astraflow.testing.engines.suite import EngineCase, EngineSuite
from astraflow.types import Sampling

PROMPT = [1, 5, 9, 13, 17, 21]


class TestLocal(EngineSuite):
    @pytest.fixture
    def case(self, endless_dir: Path) -> Iterator[EngineCase]:
        engine = LocalEngine(endless_dir)

        def advance() -> None:
            # First come, first served: when this later request has two tokens, earlier ones have too.
            engine.submit("probe", PROMPT, Sampling(max_tokens=2)).result(60)

        yield EngineCase(
            engine=engine, prompt=PROMPT, long_tokens=300, tensors=state_tensors(load_model(endless_dir)),
            advance=advance, finish=lambda: None,
        )  # fmt: skip
        engine.close()


class TestScripted(EngineSuite):
    @pytest.fixture
    def case(self) -> Iterator[EngineCase]:
        engine = ScriptedEngine(lambda prompt, number: list(range(3, 3 + 4000)), held=True)
        yield EngineCase(
            engine=engine, prompt=PROMPT, long_tokens=300, tensors={},
            advance=lambda: engine.step(2), finish=engine.release,
        )  # fmt: skip
        engine.close()
