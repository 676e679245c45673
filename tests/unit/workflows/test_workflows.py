"""The two built-in workflows and how they are built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from astraflow.config.schema import WorkflowSection
from astraflow.contracts import Environment
from astraflow.errors import AstraFlowError, ConfigError, EpisodeError, Problem
from astraflow.types import Step, Task
from astraflow.workflows.load import build_workflow
from astraflow.workflows.single_turn import SingleTurn
from astraflow.workflows.tool_use import ToolUse

CALC = Task("train", 0, 0, {"text": "3*4?", "answer": "12"})
QUESTION = Task("train", 0, 0, {"question": "What is 7+5?", "answer": "12"})


def reply(content, *exprs, finish_reason="stop"):
    calls = [SimpleNamespace(id=f"c{i}", name="calc", arguments={"expr": e}) for i, e in enumerate(exprs)]
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": "calc", "arguments": f'{{"expr": "{c.arguments["expr"]}"}}'},
            }
            for c in calls
        ]
    return SimpleNamespace(message=message, content=content, tool_calls=calls, finish_reason=finish_reason, usage={})


class Scripted:
    """Gives replies in order and keeps what it was asked."""

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []

    async def chat(self, messages, **options):
        self.asked.append(([dict(m) for m in messages], options))
        return self.replies.pop(0)


def bad_reward(completion, task):
    raise ValueError("boom")


def text_length(completion, task, scale=1.0):
    return len(completion) * scale


async def play_by_function(task, llm, bonus=0.0):
    return bonus


async def test_single_turn_asks_once_and_grades_the_text():
    actor = Scripted(reply("12"))
    play = SingleTurn(reward="exact", system="Be brief.")
    assert await play(QUESTION, {"actor": actor}) == 1.0
    assert actor.asked == [
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 7+5?"}], {})
    ]


async def test_single_turn_reward_may_be_a_function_with_options():
    play = SingleTurn(reward={"type": f"{__name__}:text_length", "scale": 0.5}, prompt="{question} Number:")
    assert await play(QUESTION, {"actor": Scripted(reply("1234"))}) == 2.0


async def test_a_reward_that_raises_is_an_error_not_a_zero():
    play = SingleTurn(reward=f"{__name__}:bad_reward")
    with pytest.raises(EpisodeError, match=r"^reward: ValueError: boom \(test_workflows.py:\d+\)$"):
        await play(QUESTION, {"actor": Scripted(reply("1"))})


async def test_a_reward_without_a_grade_stays_unscored():
    assert await SingleTurn(reward="exact")(Task("t", 0, 0, {"question": "?"}), {"a": Scripted(reply("1"))}) is None


async def test_a_prompt_that_needs_another_field_names_it():
    with pytest.raises(EpisodeError, match=r"^task: .*'question'.*text, answer"):
        await SingleTurn(reward="exact")(CALC, {"actor": Scripted()})


async def test_two_turns_of_the_calculator():
    actor = Scripted(reply("", "3*4", finish_reason="tool_calls"), reply("12."))
    outcome = await ToolUse(environment="calculator", max_turns=2)(CALC, {"actor": actor})
    assert outcome.reward == pytest.approx(1.0)
    assert outcome.metrics == {"success": 1.0, "turns": 2.0, "truncated": 0.0}
    assert outcome.rewards_per_call == pytest.approx([0.3, 0.7])
    (first, options), (second, _) = actor.asked
    assert first == [{"role": "user", "content": "3*4?"}]
    assert options["tools"][0]["function"]["name"] == "calc"
    assert second[1:] == [reply("", "3*4").message, {"role": "tool", "tool_call_id": "c0", "content": "<12>"}]


async def test_messages_that_go_to_the_policy_have_no_extra_keys():
    actor = Scripted(reply("", "3*4"), reply("12."))
    await ToolUse(environment="calculator")(CALC, {"actor": actor})
    assert all("finish_reason" not in m for m in actor.asked[1][0])


async def test_an_answer_cut_by_length_is_no_success():
    actor = Scripted(reply("", "3*4"), reply("12.", finish_reason="length"))
    outcome = await ToolUse(environment="calculator")(CALC, {"actor": actor})
    assert outcome.metrics["success"] == 0.0


async def test_a_tool_without_a_result_ends_the_conversation():
    actor = Scripted(reply("", "3*44"))
    outcome = await ToolUse(environment="calculator")(CALC, {"actor": actor})
    assert (outcome.reward, len(actor.asked)) == (0.0, 1)


async def test_max_turns_ends_the_conversation_with_the_rewards_so_far():
    actor = Scripted(*(reply("", "3*4") for _ in range(9)))
    outcome = await ToolUse(environment="calculator", max_turns=3)(CALC, {"actor": actor})
    assert len(actor.asked) == 3
    assert (outcome.reward, outcome.metrics["truncated"]) == (pytest.approx(0.3), 1.0)


async def test_a_budget_of_tokens_caps_the_last_call_and_ends_the_episode():
    first, second = reply("", "3*4"), reply("", "3*4")
    first.usage, second.usage = {"completion_tokens": 6}, {"completion_tokens": 4}
    actor = Scripted(first, second)
    outcome = await ToolUse(environment="calculator", max_sampled_tokens=10)(CALC, {"actor": actor})
    assert [options["max_tokens"] for _, options in actor.asked] == [10, 4]
    assert outcome.metrics == {"success": 0.0, "turns": 2.0, "truncated": 1.0}


async def test_a_budget_of_the_context_ends_the_episode_between_replies():
    first, second = reply("", "3*4"), reply("", "3*4")
    first.usage, second.usage = {"total_tokens": 9}, {"total_tokens": 10}
    actor = Scripted(first, second, reply("12."))
    outcome = await ToolUse(environment="calculator", max_context_tokens=10)(CALC, {"actor": actor})
    assert len(actor.asked) == 2 and outcome.metrics["truncated"] == 1.0


async def test_a_budget_of_time_ends_the_episode_between_replies():
    play = ToolUse(environment="calculator", max_wall_s=1e-9)
    assert (await play(CALC, {"actor": Scripted()})).metrics["truncated"] == 1.0


class Full(Scripted):
    async def chat(self, messages, **options):
        if not self.replies:
            raise EpisodeError("overlong: the context is full")
        return await super().chat(messages, **options)


async def test_a_full_context_cuts_the_episode_unless_it_never_began():
    outcome = await ToolUse(environment="calculator")(CALC, {"actor": Full(reply("", "3*4"))})
    assert (outcome.reward, outcome.metrics["truncated"]) == (pytest.approx(0.3), 1.0)
    with pytest.raises(EpisodeError, match="overlong"):
        await ToolUse(environment="calculator")(CALC, {"actor": Full()})


class Guess(Environment):
    """Acted in by text; a wrong guess costs."""

    def reset(self, task):
        self.secret = task["answer"]
        return "Which number?"

    def step(self, action):
        if action.text == self.secret:
            return Step("", 1.0, done=True, metrics={"guesses": float(action.turn)})
        return Step("No.", -0.25 if action.text else None)


async def test_an_environment_without_tools_is_acted_in_by_text():
    actor = Scripted(reply("7"), reply("12"))
    outcome = await ToolUse(environment=f"{__name__}:Guess")(CALC, {"actor": actor})
    assert (outcome.reward, outcome.rewards_per_call) == (0.75, [-0.25, 1.0])
    assert outcome.metrics == {"success": 0.0, "guesses": 2.0, "turns": 2.0, "truncated": 0.0}
    assert actor.asked[1][0] == [
        {"role": "user", "content": "Which number?"}, reply("7").message, {"role": "user", "content": "No."}
    ]  # fmt: skip
    assert actor.asked[0][1] == {}, "no tools, no limit"


async def test_one_step_without_a_score_leaves_the_episode_unscored():
    outcome = await ToolUse(environment=f"{__name__}:Guess")(CALC, {"actor": Scripted(reply(""), reply("12"))})
    assert outcome.reward is None and outcome.metrics["success"] == 0.0


class Broken(Environment):
    """An environment whose tool raises."""

    closed = 0

    def reset(self, task):
        return "?"

    def step(self, action):
        if action.tool is not None:
            raise RuntimeError("no disk")
        return 1.0

    def close(self):
        Broken.closed += 1


async def test_environment_failures_are_named_and_it_is_closed():
    play = ToolUse(environment=f"{__name__}:Broken")
    Broken.closed = 0
    with pytest.raises(EpisodeError, match=r"^env_error: step 1: RuntimeError: no disk \(test_workflows.py:\d+\)$"):
        await play(CALC, {"actor": Scripted(reply("", "3*4"))})
    with pytest.raises(EpisodeError, match=r"^env_error: step returned float"):
        await play(CALC, {"actor": Scripted(reply("x"))})
    assert Broken.closed == 2


async def test_each_policy_is_asked_by_name():
    actor, judge = Scripted(reply("12")), Scripted(reply("13"))
    play = SingleTurn(reward="exact", policy="judge")
    assert await play(QUESTION, {"actor": actor, "judge": judge}) == 0.0
    with pytest.raises(Problem, match="several policies"):
        build_workflow(section(type="single_turn", reward="exact"), ["actor", "judge"])
    with pytest.raises(Problem, match=r"workflow.type=single_turn never calls policies\.actor"):
        build_workflow(section(type="single_turn", reward="exact", policy="judge"), ["actor", "judge"])


def section(**keys):
    return WorkflowSection.model_validate(keys)


async def test_a_function_by_path_gets_its_options():
    play = build_workflow(section(type=f"{__name__}:play_by_function", bonus=2.0), ["actor"])
    assert await play(QUESTION, {}) == 2.0
    assert await build_workflow(section(type=f"{__name__}:play_by_function"), ["actor"])(QUESTION, {}) == 0.0


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"type": "single_tunr", "reward": "exact"}, ["single_tunr", "did you mean 'single_turn'"]),
        ({"type": "single_turn"}, ["workflow.reward", "missing"]),
        ({"type": "single_turn", "reward": "exact", "promt": "x"}, ["promt", "did you mean 'prompt'"]),
        ({"type": "single_turn", "reward": "exakt"}, ["workflow.reward", "exakt", "exact"]),
        ({"type": "single_turn", "reward": {"type": "exact", "feild": "x"}}, ["feild", "did you mean 'field'"]),
        ({"type": "single_turn", "reward": {"field": "x"}}, ["workflow.reward.type"]),
        ({"type": "single_turn", "reward": "exact", "prompt": "no field"}, ["workflow.prompt", "names no field"]),
        ({"type": "single_turn", "reward": "exact", "prompt": "{question"}, ["workflow.prompt", "not a template"]),
        ({"type": "single_turn", "reward": "exact", "policy": "judge"}, ["workflow.policy", "judge", "actor"]),
        ({"type": "tool_use", "environment": "calculater"}, ["workflow.environment", "did you mean 'calculator'"]),
        ({"type": "tool_use", "environment": "calculator", "max_turns": 0}, ["max_turns", ">= 1"]),
        ({"type": "tool_use", "environment": "calculator", "max_wall_s": -1.0}, ["max_wall_s=-1.0", ">= 0"]),
        ({"type": "tool_use", "environment": "calculator", "env_timeout_s": 0.0}, ["env_timeout_s=0.0", "> 0"]),
        ({"type": "self_play", "environment": "calculator"}, ["has 1 sides", "plays 2", "tool_use"]),
        ({"type": f"{__name__}:play_by_function", "bonsu": 1}, ["bonsu", "did you mean 'bonus'"]),
        ({"type": f"{__name__}:nothing"}, ["nothing", "cannot be imported"]),
    ],
)
def test_wrong_settings_are_refused_when_the_workflow_is_built(keys, words):
    with pytest.raises((Problem, ConfigError, AstraFlowError)) as error:
        build_workflow(section(**keys), ["actor"])
    assert all(word in str(error.value) for word in words), str(error.value)
