"""States of operators in snapshots: what JSON cannot say ends the run by name, and the run directory stays usable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.contracts import Operator
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import EpisodeCommit, Part
from astraflow.dataflow.operators.states import state_of
from astraflow.dataflow.shell import Shell
from astraflow.errors import DataflowError
from astraflow.testing.dataflow import Desk, check_law, policy_section, small_config, sources
from astraflow.types import Group
from astraflow.wire import messages as m

HERE = __name__
PLACES = ("policy", "source")


class Counting(Operator):
    """Its state is what `shown` makes of the number of groups it saw."""

    shown: Any = None
    loads: Any = None

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = Counting.shown(self.seen)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if Counting.loads is not None:
            Counting.loads(state)
        self.seen = int(state["seen"])


class Counts(Counting):
    """In the list of a policy."""

    def on_group(self, group: Group) -> Group | str:
        self.seen += 1
        return group


class CountsResults(Counting):
    """In the list of a source."""

    place = "source"

    def on_result(self, group: Group) -> None:
        self.seen += 1


def config_of(place: str) -> Any:
    if place == "source":
        return small_config(
            run__steps=100, sources__train={"type": "sums", "operators": [f"{HERE}:CountsResults"]},
            dataflow={"snapshot_every": 10},
        )  # fmt: skip
    section = policy_section(operators=[f"{HERE}:Counts"])
    return small_config(run__steps=100, policies__actor=section, dataflow={"snapshot_every": 10})


def name_of(place: str) -> str:
    return f"sources.train.operators.0 {HERE}:CountsResults" if place == "source" else "policies.actor Counts"


async def play(shell: Shell) -> None:
    """Four groups, in so many commands that a snapshot is due."""
    await shell.submit(c.ResumePolicy("actor", m.Resume(trainer_id="t", version=0, urls=(), run_id=shell.run_id)))
    await shell.submit(c.JoinNode(m.Join(node_id="n", name="n", capacity=8, run_id=shell.run_id)))
    for number in range(4):
        leases = await shell.submit(c.LeaseEpisodes("n", f"r{number}", 2))
        put = shell.segments.append(b"rows" * 10)
        parts = [[Part("actor", put.key, [i], [0], 0, 3, 0, float(i))] for i in range(2)]
        done = [EpisodeCommit(x.episode_id, x.attempt, None, {}, p) for x, p in zip(leases, parts, strict=True)]
        await shell.submit(c.CommitEpisodes("n", put, done))
    await shell.submit(c.LeaseEpisodes("n", "none", 0))
    await shell.compaction.ended()


def nan_later(seen: int) -> dict[str, Any]:
    return {"seen": seen if seen < 1 else float("nan")}


@pytest.mark.parametrize("place", PLACES)
async def test_a_state_that_json_cannot_say_ends_the_run_by_name_and_loses_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "shown", staticmethod(nan_later))
    first = Shell(config_of(place), tmp_path, sources())
    await play(first)
    failure = first.machine.state.failure
    assert first.crash is None and failure is not None, "the snapshot was due"
    assert failure.thing == name_of(place) and "Out of range float" in failure.value and "JSON" in failure.rule
    assert first.journal.num_since_snapshot == 12
    check_law(first.machine)
    first.close()
    with pytest.raises(DataflowError, match="Out of range float") as refused:
        Shell(config_of(place), tmp_path, sources())
    assert refused.value.thing == name_of(place)
    monkeypatch.setattr(Counting, "shown", staticmethod(lambda seen: {"seen": seen}))
    again = Shell(config_of(place), tmp_path, sources())
    state = again.machine.state
    assert state.failure is None and state.num_episodes == 8 and state.policies["actor"].num_waiting == 4
    assert await again.submit(c.TakeBatch("actor", "t", 0)) is not None
    check_law(again.machine)
    again.close()


@pytest.mark.parametrize("place", PLACES)
async def test_numbers_of_numpy_are_plain_ones_after_a_restart(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lambda seen: {"seen": np.float32(seen), "of": np.arange(2), "no": None, "yes": np.bool_(True)}  # noqa: E731
    monkeypatch.setattr(Counting, "shown", staticmethod(made))
    found: list[Any] = []
    monkeypatch.setattr(Counting, "loads", staticmethod(found.append))
    first = Shell(config_of(place), tmp_path, sources())
    await play(first)
    state = json.loads(first.machine.snapshot())
    first.close()
    assert found.pop(0)["seen"] == 0.0 and found == [], "the first start tries it"
    again = Shell(config_of(place), tmp_path, sources())
    assert (
        found[1:] == [{"seen": 4.0, "of": [0, 1], "no": None, "yes": True}]
        and json.loads(again.machine.snapshot()) == state
    )
    again.close()


def fails(*_: Any) -> Any:
    raise KeyError("zz")


@pytest.mark.parametrize("place", PLACES)
async def test_hooks_for_the_state_that_raise_are_named_at_the_start(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "shown", staticmethod(fails))
    with pytest.raises(DataflowError, match=r"KeyError: 'zz' failed in state_dict; mend the operator") as caught:
        Shell(config_of(place), tmp_path, sources())
    assert caught.value.thing == name_of(place)
    monkeypatch.setattr(Counting, "shown", staticmethod(lambda seen: {"seen": seen}))
    monkeypatch.setattr(Counting, "loads", staticmethod(fails))
    with pytest.raises(DataflowError, match=r"KeyError: 'zz' failed in load_state_dict") as caught:
        Shell(config_of(place), tmp_path, sources())
    assert caught.value.thing == name_of(place)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": object()}, "is not JSON"),
        ({"a": [1.0, float("inf")]}, "Out of range float"),
        ({"a": np.float32("nan")}, "Out of range float"),
        ({(1, 2): 3}, "is not JSON"),
        ({"a": "\udc80"}, "surrogates"),
        ([1], "must give a dict"),
        (None, "must give a dict"),
    ],
)
def test_what_is_no_json_is_refused(state: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "shown", staticmethod(lambda seen: state))
    with pytest.raises(DataflowError, match=said) as caught:
        state_of("policies.actor Counts", Counts())
    assert caught.value.thing == "policies.actor Counts"


@dataclass
class Window:
    """Of what an operator saw."""

    size: int
    last: float | None


@pytest.mark.parametrize("last", [0.5, None])
def test_a_state_is_taken_apart_in_the_same_way_with_and_without_nones(
    last: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"window": Window(2, last), "at": datetime(2026, 1, 2)}
    monkeypatch.setattr(Counting, "shown", staticmethod(lambda seen: own))
    assert state_of("x", Counts()) == {"window": {"size": 2, "last": last}, "at": "2026-01-02T00:00:00"}


def test_states_are_in_the_snapshot_and_not_kept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "shown", staticmethod(lambda seen: {"seen": seen}))
    desk = Desk(config_of("source"))
    assert b'"operators":[{"seen":0}]' in desk.machine.snapshot()
    assert desk.machine.state.sources["train"].operators == []


async def test_a_snapshot_that_cannot_be_written_is_not_tried_again_at_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def shown(seen: int) -> dict[str, Any]:
        asked.append(seen)
        return nan_later(seen)

    monkeypatch.setattr(Counting, "shown", staticmethod(shown))
    shell = Shell(config_of("policy"), tmp_path, sources())
    await play(shell)
    assert shell.machine.state.failure is not None
    num = len(asked)
    for number in range(3):
        await shell.submit(c.LeaseEpisodes("n", f"more{number}", 0))
    assert len(asked) == num
    shell.close()


def test_a_state_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"seen": [1, {"null": None}]}
    monkeypatch.setattr(Counting, "shown", staticmethod(lambda seen: own))
    copied = state_of("x", Counts())
    assert copied == own and copied["seen"] is not own["seen"]
