from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import LoraSection
from astraflow.contracts import Engine
from astraflow.engines.local import LocalEngine
from astraflow.engines.local.engine import PolicyEngine
from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import EngineError
from astraflow.models.load import content_checksum, load_model, state_tensors
from astraflow.testing.engines.suite import EngineCase, EngineSuite
from astraflow.types import Adapter, Sampling
from decoding import adapter_of, fresh_logprobs

PROMPT = [1, 5, 9, 13, 17, 21]


def local_case(engine: PolicyEngine, directory: Path) -> EngineCase:
    model, gates, probes = load_model(directory), list[threading.Event](), iter(range(10**6))

    def advance() -> None:
        # First come, first served: when this later request has two tokens, earlier ones have too.
        engine.submit(f"probe{next(probes)}", PROMPT, Sampling(max_tokens=2)).result(60)

    def pause() -> None:
        gates.append(threading.Event())
        engine._core.between_steps(gates[-1].wait)

    def crash() -> None:
        def broken() -> None:
            raise MemoryError("planted")

        engine._core.decoder.step = broken  # type: ignore[method-assign, assignment]

    return EngineCase(
        engine=engine, prompt=PROMPT, long_tokens=300, tensors=state_tensors(load_model(directory)),
        advance=advance, finish=lambda: None, pause=pause, resume=lambda: gates[-1].set(), crash=crash,
        score=lambda prompt, generation, temperature: fresh_logprobs(model, prompt, generation, temperature),
    )  # fmt: skip


class TestLocal(EngineSuite):
    @pytest.fixture
    def case(self, endless_dir: Path) -> Iterator[EngineCase]:
        engine = LocalEngine(endless_dir)
        yield local_case(engine, endless_dir)
        engine.close()


class TestLocalShortOfEverything(EngineSuite):
    """Few rows, little memory, prompts in small chunks, nothing kept of them."""

    @pytest.fixture
    def case(self, endless_dir: Path) -> Iterator[EngineCase]:
        engine = LocalEngine(endless_dir, max_concurrency=12, kv_cache_mb=1, prefill_chunk=4, prefix_cache_mb=0)
        yield local_case(engine, endless_dir)
        engine.close()


class TestLocalKeepingCaches(EngineSuite):
    @pytest.fixture
    def case(self, endless_dir: Path) -> Iterator[EngineCase]:
        engine = LocalEngine(endless_dir, kv_after_swap="keep")
        yield local_case(engine, endless_dir)
        engine.close()


class _WithAdapter(PolicyEngine):
    """Its weights are adapters, whatever it is given."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        assert isinstance(engine, PolicyEngine)
        super().__init__(engine._core, engine._policy)
        self._tensors = adapter_of(directory, LoraSection(rank=2, alpha=2), 5)
        self._adapter = Adapter(1.0, content_checksum(directory))

    def load_weights(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None = None) -> Future[int]:
        return super().load_weights(version, self._tensors, self._adapter)


class TestBesideOthers(EngineSuite):
    """One of three policies."""

    @pytest.fixture
    def case(self, endless_dir: Path) -> Iterator[EngineCase]:
        with closing(LocalEngine(endless_dir)) as whole:
            engines = whole.adapters(3)
            yield local_case(_WithAdapter(engines[1], endless_dir), endless_dir)


class TestScripted(EngineSuite):
    @pytest.fixture
    def case(self) -> Iterator[EngineCase]:
        engine = ScriptedEngine(lambda prompt, number: list(range(3, 3 + 4000)), held=True)
        yield EngineCase(
            engine=engine, prompt=PROMPT, long_tokens=300, tensors={},
            advance=lambda: engine.step(2), finish=engine.release, tick=engine.step,
            crash=lambda: engine.fail(EngineError("engine", "broken", "was told to", "start another")),
        )  # fmt: skip
        engine.close()
