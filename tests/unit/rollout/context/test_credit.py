"""Whose reward is it: of all policies, of one, of an agent, of a call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from astraflow.errors import EpisodeError
from astraflow.rollout.context.credit import rewarded
from astraflow.types import Call, Generation, Outcome
from chat_families import Scene
from context_agents import PLAYS


def call(policy: str, index: int, agent: str = "") -> Call:
    said = Generation(np.array([7, index], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")
    return Call(policy, index, np.array([1, 2], np.int32), said, agent=agent)


CALLS = {
    "actor": [call("actor", 0, "plan"), call("actor", 1, "code"), call("actor", 2, "plan"), call("actor", 3)],
    "judge": [call("judge", 0)],
}


@pytest.mark.parametrize(
    ("outcome", "actor", "judge"),
    [
        (Outcome(reward=1.0), (1.0, ()), (1.0, ())),
        (Outcome(), (None, ()), (None, ())),
        (Outcome(reward={"actor": 1.0}), (1.0, ()), (None, ())),
        (Outcome(reward={"actor": 1.0, "judge": 0.0}), (1.0, ()), (0.0, ())),
        (
            Outcome(reward={"actor@plan": 1.0, "actor@code": 0.5, "actor": 0.25, "judge": 0.0}),
            (0.25, (1.0, 0.5, 1.0, 0.25)), (0.0, ()),
        ),
        (
            Outcome(reward={"actor@plan": 1.0, "actor@code": None, "actor": 0.25}),
            (None, ()), (None, ()),
        ),
        (
            Outcome(reward=0.5, rewards_per_call={"actor": [1, 2, 3, 4]}),
            (0.5, (1.0, 2.0, 3.0, 4.0)), (0.5, ()),
        ),
    ],
)  # fmt: skip
def test_each_policy_has_its_reward(outcome: Outcome, actor: tuple, judge: tuple) -> None:
    branches = rewarded(CALLS, outcome)
    found = {policy: {(b.reward, b.rewards_per_call) for b in branches if b.policy == policy} for policy in CALLS}
    assert found == {"actor": {actor}, "judge": {judge}}


def test_a_policy_of_agents_has_their_mean_however_often_each_called() -> None:
    calls = {"actor": CALLS["actor"][:3]}
    branches = rewarded(calls, Outcome(reward={"actor@plan": 1.0, "actor@code": 0.0, "actor@idle": 9.0}))
    assert {(b.reward, b.rewards_per_call) for b in branches} == {(0.5, (1.0, 0.0, 1.0))}


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome(reward={"other": 1.0}), "policy='other' is not in this episode; known: actor, judge"),
        (Outcome(reward={"other@plan": 1.0}), "policy='other' is not in this episode"),
        (Outcome(reward={"actor@plan": 1.0}), "names no reward for agent '' of actor"),
        (Outcome(reward={"actor@plan": 1.0, "actor@cod": 1.0}), r"for agent .* give each agent"),
        (Outcome(rewards_per_call=[1.0]), "must name a policy"),
        (Outcome(rewards_per_call={"actor": [1.0]}), "must be one per call"),
        (
            Outcome(reward={"actor@plan": 1.0, "actor": 0.0}, rewards_per_call={"actor": [1.0] * 4}),
            "come beside rewards of agents",
        ),
    ],
)  # fmt: skip
def test_what_nobody_can_have_is_refused(outcome: Outcome, problem: str) -> None:
    with pytest.raises(EpisodeError, match=problem):
        rewarded(CALLS, outcome)


async def test_two_agents_of_one_policy_are_told_apart(make_scene: Callable[[str], Scene]) -> None:
    scene = make_scene("chatml")
    await PLAYS["two_agents"](scene)
    branches = rewarded({"actor": scene.close()}, Outcome(reward={"actor@planner": 1.0, "actor@coder": 0.0}))
    assert len(branches) == 2
    assert {(b.reward, b.rewards_per_call) for b in branches} == {(0.5, (1.0, 0.0, 1.0, 0.0))}
    assert [sorted(set(b.call_index.tolist()) - {-1}) for b in branches] == [[0, 2], [1, 3]]
