"""Workflows of several policies, played through the gateway on engines that say what a script says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from astraflow.config.schema import WorkflowSection
from astraflow.contracts import Environment
from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import ConfigError, EpisodeError, Problem
from astraflow.models.chat import ChatTokenizer
from astraflow.models.registry import model_directory
from astraflow.rollout.context.credit import rewarded
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import parser_for
from astraflow.rollout.worker.client import LLM, Policies
from astraflow.types import Action, EpisodeLease, Message, Outcome, Sampling, Step, Task
from astraflow.workflows.load import build_workflow
from sandboxed import needs_sandbox

Say = Callable[[str], str] | Sequence[str]
QUESTION = Task("train", 0, 0, {"question": "3+4?", "answer": "7"})


class Table:
    """One episode. `told`: what each policy was asked, in order; `rewards`: of each policy and call, as committed."""

    def __init__(self, chat: ChatTokenizer, **policies: Say) -> None:
        self.chat, self.policies = chat, policies
        self.told: dict[str, list[str]] = {name: [] for name in policies}

    def _engine(self, name: str, say: Say) -> ScriptedEngine:
        def reply(prompt: Any, number: int) -> list[int]:
            self.told[name].append(self.chat.decode(prompt.tolist(), skip_special_tokens=True))
            text = say(self.told[name][-1]) if callable(say) else say[number]
            return [*self.chat.encode(text), *self.chat.eos_ids[:1]]

        return ScriptedEngine(reply, max_context=512)

    async def play(self, play: Any, task: Task = QUESTION) -> Outcome:
        endpoints = {
            name: PolicyEndpoint(self._engine(name, say), self.chat, parser_for("auto", self.chat, "tool_parser"))
            for name, say in self.policies.items()
        }
        gateway = Gateway(endpoints)
        lease = EpisodeLease(
            episode_id="train/0/0/0", group_id="train/0/0", attempt=1, task=task, timeout_s=9.0, min_versions={},
            sampling=dict.fromkeys(self.policies, Sampling()),
        )  # fmt: skip
        key = gateway.open_episode(lease)
        llm = {name: LLM(name, lambda body: gateway.answer(key, body), "", key) for name in self.policies}
        outcome: Outcome = await play(task, llm)
        branches = rewarded(gateway.close_episode(key).calls, outcome)  # as the runner commits it
        self.rewards = {t.policy: t.reward for t in branches}
        self.per_call = {t.policy: t.rewards_per_call for t in branches}
        return outcome


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(model_directory("tiny-char", tmp_path_factory.mktemp("models"), 0))


def built(type_name: str, policies: Sequence[str], **options: Any) -> Any:
    return build_workflow(WorkflowSection.model_validate({"type": type_name, **options}), policies)


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


class Store(Environment):
    """An inventory that agents share: the tool gives what is left to whoever asks first."""

    made: list[Store] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.left, self.taken = 3, []
        self.made.append(self)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "take", "parameters": {"type": "object", "properties": {}}}}]

    def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": "all"}]

    def step(self, action: Action) -> Step:
        if action.tool is None:
            return Step("", float(self.left == 0), done=True)
        if action.tool != "take":
            return Step(f"no {action.tool}")
        self.left -= self.left > 0
        self.taken.append(self.left)
        return Step(str(self.left))


class Tree:
    """A policy that says, agent by agent, what its script says. `asked`: (agent, number of messages, tools)."""

    def __init__(self, script: Mapping[str, Sequence[Any]]) -> None:
        self.script = {agent: list(replies) for agent, replies in script.items()}
        self.asked: list[tuple[str, int, list[str]]] = []

    async def chat(self, messages: Sequence[Message], **options: Any) -> Any:
        agent = options["model"].partition("@")[2]
        self.asked.append((agent, len(messages), [tool["function"]["name"] for tool in options["tools"]]))
        await asyncio.sleep(0)
        said = self.script[agent].pop(0)
        calls = [] if isinstance(said, str) else said
        asked = [SimpleNamespace(id=f"c{i}", name=name, arguments=given) for i, (name, given) in enumerate(calls)]
        content = said if isinstance(said, str) else ""
        message = {"role": "assistant", "content": content}
        return SimpleNamespace(message=message, content=content, tool_calls=asked, finish_reason="stop")


TAKE = ("take", {})


def tree_of(**limits: int) -> Any:
    return built("recursive", ["actor"], environment=f"{__name__}:Store", **limits)


async def test_sub_agents_share_the_inventory_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "astraflow.workflow")
    actor = Tree(
        {
            "0": [[("spawn", {"tasks": ["x", "y"]})], [("spawn", {"tasks": ["z"]})], "all"],
            "0.0": [[TAKE], "left"], "0.1": [[TAKE], "right"], "0.2": [[TAKE, TAKE], "more"],
        }
    )  # fmt: skip
    outcome = await tree_of()(QUESTION, {"actor": actor})
    assert outcome.reward == 1.0
    assert outcome.metrics == {
        "success": 1.0, "truncated": 0.0, "agents": 4.0, "actions": 4.0, "calls": 9.0,
    }  # fmt: skip
    assert Store.made[-1].taken == [2, 1, 0, 0], "the fourth finds nothing"
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == [
        "action 1 by agent 0.0", "action 2 by agent 0.1", "action 3 by agent 0.2", "action 4 by agent 0.2",
    ]  # fmt: skip
    assert ("0.1", 1, ["take", "spawn"]) in actor.asked and ("0", 3, ["take", "spawn"]) in actor.asked


async def test_depth_and_breadth_are_limits_that_an_agent_is_told_of() -> None:
    spawn = ("spawn", {"tasks": ["x"]})
    actor = Tree(
        {
            "0": [[("spawn", {"tasks": ["x", "y", "z"]}), ("spawn", {}), spawn], "end"],
            "0.0": [[spawn], "so"],
        }
    )
    outcome = await tree_of(max_depth=1, max_breadth=2)(QUESTION, {"actor": actor})
    assert outcome.metrics["agents"] == 2.0
    assert [tools for agent, _, tools in actor.asked if agent == "0.0"] == [["take"], ["take"]]
    assert Store.made[-1].taken == [], "a spawn below the deepest level is a tool that the environment does not know"


async def test_the_budget_ends_all_agents_together() -> None:
    spawn = ("spawn", {"tasks": ["x", "y"]})
    actor = Tree({"0": [[spawn], "end"], "0.0": [[TAKE]] * 99, "0.1": [[TAKE]] * 99})
    outcome = await tree_of(budget=6)(QUESTION, {"actor": actor})
    assert outcome.metrics["calls"] == 6.0 == float(len(actor.asked))


class Falls(Store):
    def step(self, action: Action) -> Step:
        raise RuntimeError("no disk")


async def test_an_environment_that_raises_is_named() -> None:
    actor = Tree({"0": [[TAKE]]})
    with pytest.raises(EpisodeError, match=r"^env_error: step 1: RuntimeError: no disk"):
        await built("recursive", ["actor"], environment=f"{__name__}:Falls")(QUESTION, {"actor": actor})


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
        (["actor"], {"type": "recursive", "environment": f"{__name__}:Store", "budget": 0}, ["budget=0"]),
        (["router", "small"], {"type": "router", "reward": "exact"}, ["workflow.large=large"]),
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


CODE = Task("train", 0, 0, {
    "question": "twice a", "entries": ["f"], "stub": "def f(a):\n    return ", "solution": "def f(a):\n    return 2*a",
    "tests": ["assert f(1) == 2", "assert f(4) == 8"], "test_stub": "assert f(3) == ",
})  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "test", "rewards"),
    [
        ("2*a", "6", (1.0, 1.0)),
        ("a+a", "7", (1.0, 1 / 3)),  # right of the code that is wrong alone
        ("a", "6", (0.0, 1.0)),
        ("a+3", "6", (0.0, 2 / 3)),  # a test that lets wrong code pass
        ("2*a", "f", (1.0, 1 / 3)),
        ("2*a", "", (1.0, 0.0)),
    ],
)
async def test_a_tester_earns_what_its_tests_tell_apart(
    chat: ChatTokenizer, code: str, test: str, rewards: tuple[float, float]
) -> None:
    table = Table(chat, coder=[code], tester=[test])
    play = built("coder_tester", ["coder", "tester"], test_prompt="{question} {test_stub}", sandbox={"slots": 1})
    outcome = await table.play(play, CODE)
    assert (table.rewards["coder"], table.rewards["tester"]) == pytest.approx(rewards)
    assert outcome.metrics["success"] == rewards[0] and outcome.metrics["tests_written"] == float(bool(test))


@needs_sandbox
@pytest.mark.parametrize(("retry", "second"), [("", "twice a"), ("{test} fails:", "twice aa+3assert f(3) == 6 fails:")])
async def test_code_that_fails_the_testers_test_is_written_again(chat: ChatTokenizer, retry: str, second: str) -> None:
    play = built(
        "coder_tester", ["coder", "tester"], test_prompt="{question} {test_stub}", attempts=3, retry=retry,
        sandbox={"slots": 1},
    )  # fmt: skip
    wrong, right = "a*a", "2*a"
    table = Table(chat, coder=[wrong, right, wrong], tester=["6"])
    outcome = await table.play(play, CODE)
    assert table.told["coder"] == ["twice a", second.replace("a+3", wrong)] and len(table.told["tester"]) == 1
    assert outcome.reward == {"coder": 1.0, "tester": 1.0} and outcome.rewards_per_call == {"coder": [0.0, 1.0]}
    assert outcome.metrics["success"] == 1.0 and outcome.metrics["attempts"] == 2.0


@needs_sandbox
@pytest.mark.parametrize(("test", "codes", "share"), [("7", 3, 1 / 5), ("", 1, 0.0)])
async def test_a_wrong_test_costs_attempts_and_none_at_all_costs_none(
    chat: ChatTokenizer, test: str, codes: int, share: float
) -> None:
    play = built("coder_tester", ["coder", "tester"], test_prompt="{test_stub}", attempts=3, sandbox={"slots": 1})
    table = Table(chat, coder=["2*a"] * 3, tester=[test])
    outcome = await table.play(play, CODE)
    assert len(table.told["coder"]) == codes
    assert outcome.reward == {"coder": 1.0, "tester": pytest.approx(share)}


@needs_sandbox
async def test_a_coder_without_tests_of_the_task_is_an_error(chat: ChatTokenizer) -> None:
    play = built("coder_tester", ["coder", "tester"], sandbox={"slots": 1})
    with pytest.raises(EpisodeError, match="needs a task of functions"):
        await Table(chat, coder=["x"], tester=["x"]).play(play)


async def test_rewards_that_take_time_are_awaited(chat: ChatTokenizer) -> None:
    async def slow(completion: str, task: Task) -> float:
        await asyncio.sleep(0)
        return float(completion == task["answer"])

    play = built("best_of_n", ["actor", "judge"], reward="exact", policy="actor", judge="judge", n=2)
    play._questions._reward = slow
    table = Table(chat, actor=["7", "8"], judge=["9", "0"])
    outcome = await table.play(play)
    assert outcome.metrics["solved"] == 1.0
