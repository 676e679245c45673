"""Gymnasium's toy texts by the adapter: oracle, null and random, what is told, what is refused."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="pip install 'astraflow[gymnasium]'")

import gymnasium

from astraflow.environments.adapters.gymnasium import KNOWN, Gymnasium
from astraflow.errors import Problem
from astraflow.testing.environments.suite import check_environment, reward_of_chance
from astraflow.types import Action, Step, Task
from recorded import recorded

SEEDS = [{"seed": seed} for seed in (0, 1, 2)]


def planned(name: str, **options: Any) -> Any:
    """An oracle that searches the rules of the game itself (their tables of transitions)."""
    world = gymnasium.make(name, **options).unwrapped
    words = KNOWN[name.partition("-v")[0]].actions

    def policy(task: Task, told: list[Step], chance: Any) -> str:
        state, _ = gymnasium.make(name, **options).reset(seed=task.seed)
        return words[_shortest(world.P, int(state))[len(told) - 1]]

    return policy


def _shortest(table: Any, start: int) -> list[int]:
    seen, queue = {start}, deque([(start, [])])
    while queue:
        state, path = queue.popleft()
        for action, outcomes in table[state].items():
            ((_, after, reward, over),) = outcomes
            if over and reward > (-2 if start == 36 else 0):
                return [*path, action]
            if not over and after not in seen and reward > -100:
                seen.add(after)
                queue.append((after, [*path, action]))
    raise AssertionError("no way")


def hits_and_sticks(task: Task, told: list[Step], chance: Any) -> str:
    """Knows the cards: tries each number of hits."""
    for hits in range(6):
        world = gymnasium.make("Blackjack-v1")
        world.reset(seed=task.seed)
        over, reward = False, 0.0
        for action in [*[1] * hits, 0]:
            if not over:
                _, reward, over, _, _ = world.step(action)
        if reward > 0:
            return "hit" if len(told) <= hits else "stick"
    raise AssertionError("these cards cannot win")


@pytest.mark.parametrize(
    ("name", "options", "oracle", "show"),
    [
        ("FrozenLake-v1", {"is_slippery": False}, planned, "picture"),
        ("FrozenLake-v1", {"is_slippery": False}, planned, "state"),
        ("CliffWalking-v1", {}, planned, "picture"),
        ("Taxi-v4", {}, planned, "picture"),
        ("Blackjack-v1", {}, hits_and_sticks, "picture"),
        ("Blackjack-v1", {}, hits_and_sticks, "state"),
    ],
)
def test_oracle_null_and_random(name: str, options: dict[str, Any], oracle: Any, show: str) -> None:
    spec = {"type": "gymnasium", "id": name, "options": options, "show": show, "reward": "success"}
    seeds = [{"seed": seed} for seed in range(60) if name != "Blackjack-v1" or _can_win(seed)][:3]
    policy = oracle(name, **options) if oracle is planned else oracle
    words = KNOWN[name.partition("-v")[0]].actions
    report = check_environment(spec, seeds, oracle=policy, actions=words)
    assert report.oracle == 1.0 and report.null == 0.0 and report.random < 1.0
    chance = reward_of_chance(spec, [{"seed": seed} for seed in range(100)], words)
    what = f"`gymnasium` {name}" + ", not slippery" * bool(options)
    recorded(what, "100 seeds", oracle=report.oracle, null=report.null, random=chance)


def _can_win(seed: int) -> bool:
    try:
        return bool(hits_and_sticks(Task("t", 0, 0, {"seed": seed}), [Step()], None))
    except AssertionError:
        return False


def test_it_is_acted_in_by_a_tool_too_and_in_a_process() -> None:
    spec = {"type": "gymnasium", "id": "FrozenLake-v1", "tool": True, "runs": "cpu", "options": {"is_slippery": False}}
    said = planned("FrozenLake-v1", is_slippery=False)

    def policy(task: Task, told: list[Step], chance: Any) -> Action:
        return Action(tool="act", arguments={"action": said(task, told, chance)})

    assert check_environment(spec, SEEDS, oracle=policy).oracle == 1.0


def test_what_is_told() -> None:
    lake = Gymnasium(id="FrozenLake-v1", options={"is_slippery": False})
    assert lake.reset(Task("t", 0, 0, {"seed": 1})).splitlines()[1:3] == [
        "Say one of: left, down, right, up.", "[S]FFF"
    ]  # fmt: skip
    assert "S[F]FF" in lake.step(Action(text="left? No: Right!")).text, "the last word counts"
    assert lake.step(Action(text="2")).text.endswith("SF[F]F\nFHFH\nFFFH\nHFFG"), "so does a number"
    refused = lake.step(Action(text="jump"))
    assert refused.text == "No move. Say one of: left, down, right, up." and refused.metrics == {"invalid": 1.0}
    fell = lake.step(Action(text="right"))
    fell = lake.step(Action(text="down"))
    assert fell.done and fell.metrics == {"success": 0.0, "invalid": 1.0}


def test_words_for_what_a_picture_does_not_show() -> None:
    assert "The passenger is at" in Gymnasium(id="Taxi-v4").reset(Task("t", 0, 0, {"seed": 1}))
    cards = Gymnasium(id="Blackjack-v1")
    assert "The dealer shows" in cards.reset(Task("t", 0, 0, {"seed": 1}))
    assert Gymnasium(id="FrozenLake-v1", show="state").reset(Task("t", 0, 0, {"seed": 1})) == "0"


def test_its_own_limit_of_steps_is_a_cut_not_a_loss() -> None:
    lake = Gymnasium(id="FrozenLake-v1", options={"is_slippery": False, "max_episode_steps": 2})
    lake.reset(Task("t", 0, 0, {"seed": 1}))
    lake.step(Action(text="left"))
    assert lake.step(Action(text="left")).metrics == {"success": 0.0, "invalid": 0.0, "truncated": 1.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "FrozenLake-v0"}, ["FrozenLake-v0", "not registered", "known here: FrozenLake-v1"]),
        ({"id": "Pendulum-v1"}, ["has actions Box"]),
        ({"id": "FrozenLake-v1", "options": {"mapp": 1}}, ["mapp", "mend its options"]),
        ({"id": "FrozenLake-v1", "actions": ["a"]}, ["must name 4 actions"]),
        ({"id": "FrozenLake-v1", "show": "film"}, ["film"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Problem) as caught:
        Gymnasium(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
