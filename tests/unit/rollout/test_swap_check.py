"""A node looks whether its engine computes with what it fetched."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.engines.local import LocalEngine
from astraflow.engines.scripted import ScriptedEngine
from astraflow.rollout.policies import Weights
from astraflow.rollout.swap_check import ServedCheck
from astraflow.testing.engines.effective import random_batch, run_config, write_model
from astraflow.training.learner import Learner
from astraflow.types import Adapter, EffectiveWeights, WeightVersion
from astraflow.weights.client import WeightClient


class Deaf(LocalEngine):
    """Says that it took a version, and goes on with the weights it had."""

    def load_weights(self, version: int, tensors: Any, adapter: Adapter | None = None) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(version)
        return done


class Lying(Deaf):
    """Deaf, and says the new version of the old weights."""

    def effective_weights(self) -> Future[EffectiveWeights]:
        told: Future[EffectiveWeights] = Future()
        told.set_result(msgspec.structs.replace(super().effective_weights().result(60), version=1))
        return told


class Mislabeled(LocalEngine):
    """Takes a version, and labels what it samples with another."""

    def effective_weights(self) -> Future[EffectiveWeights]:
        told: Future[EffectiveWeights] = Future()
        told.set_result(msgspec.structs.replace(super().effective_weights().result(60), version=0))
        return told


@pytest.fixture(params=[{}, {"lora": {"rank": 3}}], ids=["whole", "lora"])
def learner(request: pytest.FixtureRequest, tmp_path: Path):
    model = write_model(tmp_path / "model", tied=True)
    made = Learner(run_config(model, {**request.param, "optimizer": {"lr": 1e-2}}), "actor", tmp_path)
    made.train(random_batch(0))
    made.flush()
    yield made
    made.close()


async def follow(engine: Any, learner: Learner) -> ServedCheck:
    """One version through the weight loop of a node."""
    ended = asyncio.Event()
    check = ServedCheck("actor", lambda: Path(learner.section.model))
    weights = Weights("actor", WeightClient(None), lambda: None, check)
    weights.announce(WeightVersion("actor", 1, (learner.store.url,)))
    look = check.look

    async def looked(*args: Any) -> None:
        await look(*args)
        ended.set()

    check.look = looked  # type: ignore[method-assign]
    task = asyncio.create_task(weights.follow(engine))
    async with asyncio.timeout(60):
        await ended.wait()
    task.cancel()
    engine.close()
    return check


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_that_took_a_version_is_fine(learner: Learner, dtype: str) -> None:
    check = await follow(LocalEngine(learner.section.model, dtype=dtype), learner)
    assert check.counts == {"weights_checked": 1, "weights_wrong": 0}


@pytest.mark.parametrize("kind", [Deaf, Lying, Mislabeled])
async def test_one_that_did_not_is_named(
    learner: Learner, kind: type[LocalEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "astraflow.node"):
        check = await follow(kind(learner.section.model), learner)
    assert check.counts == {"weights_checked": 1, "weights_wrong": 1}
    assert "the engine of actor computes with other weights than those of version 1" in caplog.text


async def test_an_engine_without_weights_is_not_compared_and_named_once(
    learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    check = await follow(ScriptedEngine([[3]]), learner)
    second = ScriptedEngine([[3]])
    await check.look(second, None)  # type: ignore[arg-type]
    second.close()
    assert check.counts["weights_checked"] == 0
    assert caplog.text.count("the engine of actor says no checksum of its weights") == 1
