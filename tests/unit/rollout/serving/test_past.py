"""A pool of past versions: the same on every node, whenever it came, and never empty for lack of an old version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.engines.scripted import ScriptedEngine
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import NoParser
from astraflow.rollout.policies import Weights
from astraflow.rollout.serving.past import Past
from astraflow.types import EpisodeLease, Task, WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.store import FileStore, Pins


@given(every=st.integers(1, 7), keep=st.integers(1, 5), newest=st.integers(0, 200))
def test_the_engines_of_a_copy_hold_the_newest_multiples(every: int, keep: int, newest: int) -> None:
    found = [Past(every, keep, n).of(WeightVersion("p", newest, ("u",))) for n in range(keep)]
    held = sorted(version.version for version in found if version is not None)
    assert held == list(range(0, newest + 1, every))[-keep:]
    assert all(version.urls == ("u",) for version in found if version is not None)


@given(every=st.integers(1, 7), keep=st.integers(1, 5), newest=st.integers(0, 200))
def test_one_more_version_changes_one_engine_at_most(every: int, keep: int, newest: int) -> None:
    pool = [Past(every, keep, n) for n in range(keep)]
    before, after = ([past.of(WeightVersion("p", v)) for past in pool] for v in (newest, newest + 1))
    assert sum(a != b for a, b in zip(before, after, strict=True)) == ((newest + 1) % every == 0)


class Opponents:
    """What goes into the engines of one copy on one node."""

    def __init__(self, every: int, keep: int) -> None:
        self.client = WeightClient(None, give_up_s=0.0)
        self.weights = [Weights("player", self.client, lambda: None, None, Past(every, keep, n)) for n in range(keep)]

    def announce(self, newest: WeightVersion) -> None:
        for weights in self.weights:
            weights.announce(newest)

    async def fetch(self) -> list[int]:
        return [(await weights.fetch_newer(-1)).version for weights in self.weights]


def played(directory: Path, newest: int, pins: Pins) -> FileStore:
    store = FileStore(directory, "player", keep=2, durable=False, pins=pins)
    for version in range(newest + 1):
        store.publish(version, {"w": torch.full((3,), float(version))})
    return store


async def test_a_node_that_is_late_or_starts_again_gets_the_same_pool(tmp_path: Path) -> None:
    store = played(tmp_path, 23, Pins(pools=frozenset({(5, 4)})))
    for _ in range(2):
        node = Opponents(every=5, keep=3)
        node.announce(store.latest())
        assert sorted(await node.fetch()) == [10, 15, 20]
    node.announce(store.latest())
    store.publish(24, {"w": torch.zeros(3)})
    node.announce(store.latest())
    assert sorted(weights.announced for weights in node.weights) == [10, 15, 20], "nothing new for the past"


async def test_a_past_that_no_store_has_is_replaced_by_the_newest(tmp_path: Path) -> None:
    store = played(tmp_path, 23, Pins())
    node = Opponents(every=5, keep=2)
    node.announce(store.latest())
    assert await node.fetch() == [23, 23]
    assert [weights.num_failures for weights in node.weights] == [1, 1]
    for version in (24, 25):
        store.publish(version, {"w": torch.zeros(3)})
        node.announce(store.latest())
    assert [weights.announced for weights in node.weights] == [23, 25], "25 = 5 * 5 is of engine 1"


async def test_before_there_are_enough_versions_the_others_wait(tmp_path: Path) -> None:
    store = played(tmp_path, 4, Pins())
    node = Opponents(every=5, keep=2)
    node.announce(store.latest())
    assert [weights.announced for weights in node.weights] == [0, -1]


class _Chat:
    eos_ids = ()
    vocab_size = 9


@pytest.fixture
def endpoint() -> PolicyEndpoint:
    first, *others = (ScriptedEngine([[3]]) for _ in range(3))
    return PolicyEndpoint(first, _Chat(), NoParser(), None, (), others)  # type: ignore[arg-type]


def lease_of(group: str, sibling: int = 0) -> EpisodeLease:
    task = Task("train", 0, 0, {})
    return EpisodeLease(
        episode_id=f"{group}/{sibling}",
        group_id=group,
        attempt=1,
        task=task,
        timeout_s=1.0,
        min_versions={},
        sampling={},
    )


def test_a_group_meets_one_opponent_and_all_opponents_are_met(endpoint: PolicyEndpoint) -> None:
    groups = [f"train/{row}/0" for row in range(60)]
    assert {endpoint.of(lease_of(g)).engine for g in groups} == {endpoint.engines[0]}, "the others have no weights"
    for version, engine in enumerate(endpoint.engines[1:]):
        engine.load_weights(version, {}).result(0)
    assert {endpoint.of(lease_of(group)).engine for group in groups} == set(endpoint.engines[1:])
    for group in groups:
        assert len({endpoint.of(lease_of(group, sibling)).engine for sibling in range(8)}) == 1
    assert endpoint.engine is endpoint.engines[0], "it is not changed itself"
