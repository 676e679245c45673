"""Workflows of several policies, played through the gateway on engines that say what a script says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import WorkflowSection
from astraflow.contracts import Environment
from astraflow.errors import ConfigError, EpisodeError, Problem
from astraflow.models.chat import ChatTokenizer
from astraflow.rollout.worker.client import Policies
from astraflow.types import Action, Step, Task
from astraflow.workflows.load import build_workflow
from astraflow.workflows.teams import actor_verifier
from team_table import QUESTION, Table, built


async def test_an_actor_that_is_refused_tries_again_and_hears_why(chat: ChatTokenizer) -> None:
    table = Table(chat, actor=["8", "7"], verifier=["no", "yes"])
    play = built("actor_verifier", ["actor", "verifier"], reward="exact", check="{question}{answer}", retry="no:")
    outcome = await table.play(play)
    assert table.told == {"actor": ["3+4?", "3+4?8no:"], "verifier": ["3+4?8", "3+4?7"]}
    assert table.rewards == {"actor": 1.0, "verifier": 1.0}
    assert table.per_call == {"actor": (0.0, 1.0), "verifier": (1.0, 1.0)}
    assert outcome.metrics == {"success": 1.0, "attempts": 2.0}


async def test_a_verifier_is_paid_for_what_is_right_not_for_what_it_accepts(chat: ChatTokenizer) -> None:
    play = built("actor_verifier", ["actor", "verifier"], reward="exact", check="{answer}", attempts=2)
    table = Table(chat, actor=["8"], verifier=["yes"])
    await table.play(play)
    assert table.rewards == {"actor": 0.0, "verifier": 0.0}
    table = Table(chat, actor=["7", "8"], verifier=["no", "no"])
    await table.play(play)
    assert table.rewards == {"actor": 0.0, "verifier": 0.5}


async def test_a_task_without_an_answer_is_unscored_for_all(chat: ChatTokenizer) -> None:
    table = Table(chat, actor=["8"], verifier=["yes"])
    await table.play(built("actor_verifier", ["actor", "verifier"], reward="exact"), Task("t", 0, 0, {"question": "?"}))
    assert table.rewards == {"actor": None, "verifier": None}


@pytest.mark.parametrize(("choice", "reward"), [("2", 1.0), ("1) is", 0.0), ("9", 0.0), ("no idea", 0.0)])
async def test_a_selector_earns_its_choice_and_each_answer_its_own(
    chat: ChatTokenizer, choice: str, reward: float
) -> None:
    table = Table(chat, solver=["8", "7", "9"], selector=[choice])
    play = built("solver_selector", ["solver", "selector"], reward="exact", candidates=3, select="{answers}")
    outcome = await table.play(play)
    assert table.told["selector"] == ["1) 8\n2) 7\n3) 9"]
    assert table.rewards == {"solver": pytest.approx(1 / 3), "selector": reward}
    assert sorted(table.per_call["solver"]) == [0.0, 0.0, 1.0]
    assert outcome.metrics == {"success": reward, "solved": 1.0}


@pytest.mark.parametrize(("alone", "gain"), [("7", 0.0), ("8", 1.0)])
async def test_a_planner_earns_what_its_plan_gained(chat: ChatTokenizer, alone: str, gain: float) -> None:
    def execute(prompt: str) -> str:
        return "7" if "add" in prompt else alone

    table = Table(chat, planner=["add"], executor=execute)
    options = {"reward": "exact", "plan": "{question}how", "execute": "{question}{plan}"}
    await table.play(built("planner_executor", ["planner", "executor"], credit="counterfactual", **options))
    assert sorted(table.told["executor"]) == ["3+4?", "3+4?add"]
    assert table.rewards == {"planner": gain, "executor": (1.0 + float(alone == "7")) / 2}
    table = Table(chat, planner=["add"], executor=execute)
    await table.play(built("planner_executor", ["planner", "executor"], **options))
    assert table.rewards == {"planner": 1.0, "executor": 1.0}


async def test_a_router_pays_for_the_large_model_and_who_was_not_called_has_no_rows(chat: ChatTokenizer) -> None:
    play = built("router", ["router", "small", "large"], reward="exact", route="{question}who", cost=0.25)
    table = Table(chat, router=["large"], small=[], large=["7"])
    await table.play(play)
    assert table.rewards == {"router": 0.75, "large": 1.0}
    table = Table(chat, router=["?"], small=["7"], large=[])
    await table.play(play)
    assert table.rewards == {"router": 1.0, "small": 1.0}


async def test_a_share_of_tasks_is_kept_from_the_router_for_all_siblings_alike(chat: ChatTokenizer) -> None:
    options = {"reward": "exact", "route": "{question}who", "explore": 0.5}
    play = built("router", ["router", "small", "large"], **options)
    seen = []
    for row in range(12):
        task = Task("train", row, 0, QUESTION.fields)
        called = []
        for _ in range(2):
            table = Table(chat, router=["small"], small=["7"], large=["7"])
            await table.play(play, task)
            called.append(sorted(table.rewards))
        assert called[0] == called[1]
        seen.append(tuple(called[0]))
    assert set(seen) == {("large",), ("small",), ("router", "small")}
    with pytest.raises(Problem, match="explore=1"):
        built("router", ["router", "small", "large"], reward="exact", explore=1.0)


async def test_models_of_equal_price_are_worth_their_grade_to_the_router(chat: ChatTokenizer) -> None:
    play = built("router", ["router", "small", "large"], reward="exact", route="{question}who", cost=0)
    table = Table(chat, router=["Large"], small=[], large=["7"])
    await table.play(play)
    assert table.rewards == {"router": 1.0, "large": 1.0}


async def test_one_policy_may_plan_and_execute(chat: ChatTokenizer) -> None:
    play = built("planner_executor", ["actor"], reward="exact", planner="actor", executor="actor")
    table = Table(chat, actor=["add", "7"])
    await table.play(play)
    assert table.rewards == {"actor": 1.0}


async def test_the_best_of_n_is_what_the_judge_marks_highest(chat: ChatTokenizer) -> None:
    def mark(prompt: str) -> str:
        return {"7": "9", "8": "3"}.get(prompt, "none")

    options = {"reward": "exact", "n": 3, "judge_prompt": "{answer}"}
    table = Table(chat, actor=["8", "7", "x"], judge=mark)
    outcome = await table.play(built("best_of_n", ["actor", "judge"], **options))
    assert outcome.metrics == {"success": 1.0, "solved": 1.0}
    assert table.rewards == {"actor": pytest.approx(1 / 3), "judge": pytest.approx((2 / 3 + 1 + 1) / 3)}
    table = Table(chat, actor=["8", "7", "x"], judge=mark)
    await table.play(built("best_of_n", ["actor", "judge"], learn_from_judge=True, **options))
    assert table.rewards == {"actor": pytest.approx((1 / 3 + 1 + 0) / 3), "judge": None}


class Nim(Environment):
    """Take 1 to 3; who takes the last one wins, who says something else loses."""

    sides = 2

    def reset(self, task: Task) -> Step:
        self.pile = task["pile"]
        return Step(f"{self.pile}?", side=task["first"])

    def step(self, action: Action) -> Step:
        wrong = action.text not in ("1", "2", "3") or int(action.text) > self.pile
        self.pile -= 0 if wrong else int(action.text)
        if wrong or not self.pile:
            winner = 1 - action.side if wrong else action.side
            return Step("", [float(winner == side) for side in (0, 1)], done=True)
        return Step(f"{self.pile}?", side=1 - action.side)


def nim(row: int, pile: int, first: int) -> Task:
    return Task("t", row, 0, {"pile": pile, "first": first})


async def test_a_player_meets_the_opponent_of_the_task(chat: ChatTokenizer) -> None:
    names = ["player", "past", "older"]
    play = built("self_play", names, environment=f"{__name__}:Nim", opponents=names[1:])
    table = Table(chat, player=["2", "1"], past=["1"], older=[])
    outcome = await table.play(play, nim(0, 4, 0))
    assert table.told == {"player": ["4?", "4?21?"], "past": ["2?"], "older": []}
    assert table.rewards == {"player": 1.0, "past": 0.0} and outcome.metrics == {
        "success": 1.0, "moves": 3.0, "truncated": 0.0,
    }  # fmt: skip
    table = Table(chat, player=["2"], past=[], older=["3"])
    await table.play(play, nim(1, 5, 1))
    assert table.rewards == {"player": 1.0, "older": 0.0}


async def test_a_player_may_be_its_own_opponent_each_side_with_a_reward_of_its_own(chat: ChatTokenizer) -> None:
    table = Table(chat, player=["3", "1"])
    await table.play(built("self_play", ["player"], environment=f"{__name__}:Nim", opponents=["player"]), nim(0, 4, 0))
    assert table.told == {"player": ["4?", "1?"]}
    assert table.rewards == {"player": 0.5} and table.per_call == {"player": (0.0, 1.0)}


@pytest.mark.parametrize(
    ("policies", "keys", "words"),
    [
        (["actor"], {"type": "actor_verifier", "reward": "exact"}, ["workflow.verifier=verifier", "actor"]),
        (
            ["actor", "verifier", "judge"],
            {"type": "actor_verifier", "reward": "exact"},
            ["workflow.type=actor_verifier never calls policies.judge", "workflow.actor, workflow.verifier"],
        ),
        (["solver", "selector"], {"type": "solver_selector", "reward": "exact", "candidates": 1}, ["candidates=1"]),
        (["planner", "executor"], {"type": "planner_executor", "reward": "exact", "credit": "tem"}, ["credit", "team"]),
        (["player"], {"type": "self_play", "environment": f"{__name__}:Nim", "opponents": []}, ["at least one"]),
        (["player"], {"type": "self_play", "environment": f"{__name__}:Nim"}, ["workflow.opponents.0=opponent"]),
        (["router", "small"], {"type": "router", "reward": "exact"}, ["workflow.large=large"]),
        (
            ["actor"],
            {"type": "actor_verifier", "reward": "exact", "verifier": "actor"},
            ["workflow.verifier=actor is workflow.actor already", "name another policy"],
        ),
        (["actor"], {"type": "best_of_n", "reward": "exact", "judge": "actor"}, ["judge=actor is workflow.policy"]),
        (["coder"], {"type": "coder_tester", "tester": "coder"}, ["workflow.tester=coder is workflow.coder already"]),
        (["a", "b"], {"type": "router", "reward": "exact", "router": "a", "small": "b", "large": "b"}, ["large=b is"]),
        (["router", "small", "large"], {"type": "router", "reward": "exact", "cost": -0.1}, ["workflow.cost=-0.1"]),
        (["router", "small", "large"], {"type": "router", "reward": "exact", "choose_large": ""}, ["choose_large=''"]),
        (["actor", "verifier"], {"type": "actor_verifier", "reward": "exact", "accept": ""}, ["accept=''", "empty"]),
    ],
)  # fmt: skip
def test_roles_and_limits_that_cannot_be_are_refused_at_load(
    policies: list[str], keys: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises((Problem, ConfigError)) as caught:
        build_workflow(WorkflowSection.model_validate(keys), policies)
    assert all(word in str(caught.value) for word in words), str(caught.value)


async def test_a_workflow_that_calls_an_undeclared_policy_is_told_which_there_are() -> None:
    with pytest.raises(EpisodeError, match=r"^workflow: llm\['judge'\] is not a policy of this run; known: actor"):
        Policies({"actor": 1})["judge"]


def test_each_workflow_is_short() -> None:
    files = Path(actor_verifier.__file__).parent.glob("*.py")
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert len(lengths) == 9 and {name: lines for name, lines in lengths.items() if lines > 100} == {}


async def test_rewards_that_take_time_are_awaited(chat: ChatTokenizer) -> None:
    async def slow(completion: str, task: Task) -> float:
        await asyncio.sleep(0)
        return float(completion == task["answer"])

    play = built("best_of_n", ["actor", "judge"], reward="exact", policy="actor", judge="judge", n=2)
    play._questions._reward = slow
    table = Table(chat, actor=["7", "8"], judge=["9", "0"])
    outcome = await table.play(play)
    assert outcome.metrics["solved"] == 1.0
