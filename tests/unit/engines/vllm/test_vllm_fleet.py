"""Replicas of one model as one engine: shares of requests, weights that reach each, one that goes away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow.engines.vllm.engine import VllmEngine
from astraflow.types import Sampling

PROMPT = [1, 5, 9, 13]


@pytest.fixture
def owners(start: Callable[..., Any]) -> list[Any]:
    """Two servers of somebody else, which sample when they are told to."""
    return [start(args={"fake_held": True}) for _ in range(2)]


@pytest.fixture
def urls(owners: list[Any]) -> list[str]:
    return [owner.url for owner in owners]


@pytest.fixture
def fleet(urls: list[str], endless_dir: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(endless_dir, urls=urls, dtype="float32", ready_s=0.3)
    yield engine
    engine.close()


def test_requests_are_shared_and_every_replica_goes_over_to_new_weights(
    fleet: VllmEngine, owners: list[Any], tensors: dict[str, torch.Tensor]
) -> None:
    fleet.load_weights(3, tensors).result(60)
    futures = [fleet.submit(str(i), PROMPT, Sampling(max_tokens=8)) for i in range(6)]
    for owner in owners:
        owner.tell("step", tokens=2, requests=3)
    owners[0].until(lambda: fleet.stats()["sampled_tokens"] == 12)
    fleet.load_weights(4, {name: tensor + 1 for name, tensor in tensors.items()}).result(60)
    for owner in owners:
        owner.tell("step", tokens=6, requests=3)
    assert all(future.result(60).versions.tolist() == [3] * 2 + [4] * 6 for future in futures)
    assert [len(owner.bodies()) for owner in owners] == [3, 3]
    assert fleet.version == 4 and fleet.effective_weights().result(60).checksum
    fleet.close()
    assert [owner.engine._keeper.host.ended() for owner in owners] == [None, None], "they are not ours to end"


def test_no_replica_samples_before_all_have_the_weights(
    fleet: VllmEngine, owners: list[Any], tensors: dict[str, torch.Tensor]
) -> None:
    fleet.load_weights(3, tensors).result(60)
    for owner in owners:
        steps = [each[0] for each in owner.tell("seen") if each[0] in ("pause", "finish_weight_update", "resume")]
        assert steps[-3:] == ["pause", "finish_weight_update", "resume"]


def test_a_replica_that_computes_with_other_weights_is_seen(
    fleet: VllmEngine, owners: list[Any], tensors: dict[str, torch.Tensor]
) -> None:
    owners[1].tell("fault", update_weights="torn")
    fleet.load_weights(3, tensors).result(60)
    assert "other numbers in 1 weights (a.weight)" in fleet.effective_weights().result(60).checksum


def test_what_the_replicas_say_is_summed(fleet: VllmEngine, owners: list[Any]) -> None:
    fleet._keeper.limits = replace(fleet._keeper.limits, watch_s=0.02)
    futures = [fleet.submit(str(i), PROMPT, Sampling(max_tokens=4)) for i in range(4)]
    owners[0].until(lambda: fleet.stats().get("server_running") == 4)
    assert fleet.stats()["kv_usage"] == 0.25
    for owner in owners:
        owner.tell("step", tokens=4, requests=2)
    assert [future.result(60).finish_reason for future in futures] == ["length"] * 4


def test_one_that_is_gone_for_good_ends_the_engine_by_its_url(
    fleet: VllmEngine, owners: list[Any], urls: list[str]
) -> None:
    fleet._keeper.limits = replace(fleet._keeper.limits, watch_s=0.02)
    owners[1].engine.close()
    assert urls[1] in str(fleet.ended.result(60))
