"""The calculator's tool and its reward."""

from __future__ import annotations

import pytest

from astraflow.environments.calculator import Calculator
from astraflow.errors import Problem
from astraflow.types import Task

TASK = Task("train", 0, 0, {"text": "3*4?", "answer": "12", "a": 3, "b": 4, "op": "*"})


def call(arguments, finish_reason="tool_calls", name="calc"):
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
        "finish_reason": finish_reason,
    }


def say(content, finish_reason="stop"):
    return {"role": "assistant", "content": content, "finish_reason": finish_reason}


RIGHT_CALL = call('{"expr": "3*4"}')
RESULT = {"role": "tool", "tool_call_id": "c", "content": "<12>"}


def score(*turns):
    world = Calculator()
    outcome = world.score([*world.reset(TASK), *turns])
    return outcome.reward, outcome.metrics["success"]


def test_the_tool_evaluates_digit_operator_digit():
    world = Calculator()
    assert world.reset(TASK) == [{"role": "user", "content": "3*4?"}]
    assert world.call("calc", {"expr": "3*4"}) == "<12>"
    assert world.call("calc", {"expr": "2-9"}) == "<-7>"
    assert world.call("calc", {"expr": "9+9"}) == "<18>"


@pytest.mark.parametrize("expr", ["3*44", "3/4", "", "3*", "a*4", "3*4 ", "3**4", "\u0663*4", None, 34])
def test_an_invalid_expression_has_no_result_and_no_reward(expr):
    assert Calculator().call("calc", {"expr": expr}) is None


def test_an_unknown_tool_has_no_result():
    assert Calculator().call("search", {"expr": "3*4"}) is None
    assert Calculator().call("calc", {"x": "3*4"}) is None


@pytest.mark.parametrize(
    ("turns", "reward", "success"),
    [
        ((RIGHT_CALL, RESULT, say("12.")), 1.0, 1.0),
        ((RIGHT_CALL, RESULT, say(" 12. ")), 1.0, 1.0),
        ((RIGHT_CALL, RESULT, say("12")), 0.3, 0.0),
        ((RIGHT_CALL, RESULT, say("13.")), 0.3, 0.0),
        ((RIGHT_CALL, RESULT, say("12.", "length")), 0.3, 0.0),
        ((RIGHT_CALL, RESULT, RIGHT_CALL), 0.3, 0.0),
        ((RIGHT_CALL, RESULT), 0.3, 0.0),
        ((RIGHT_CALL, RESULT, say("12."), say("12.")), 0.3, 0.0),
        ((call('{"expr": "3*5"}'), RESULT, say("12.")), 0.1 + 0.2 * 2 / 3 + 0.7, 1.0),
        ((call('{"expr": "8-1"}'), RESULT, say("7.")), 0.1, 0.0),
        ((call('{"expr": "3*44"}'),), 0.0, 0.0),
        ((call("not json"),), 0.0, 0.0),
        ((call('{"expr": "3*4"}', name="other"),), 0.0, 0.0),
        ((say("12."),), 0.0, 0.0),
        ((), 0.0, 0.0),
    ],
)
def test_rewards(turns, reward, success):
    got, ok = score(*turns)
    assert got == pytest.approx(reward)
    assert ok == success


@pytest.mark.parametrize(
    ("turns", "parts"),
    [
        ((RIGHT_CALL, RESULT, say("12.")), [0.3, 0.7]),
        ((RIGHT_CALL, RESULT, say("13.")), [0.3, 0.0]),
        ((call('{"expr": "8-1"}'), RESULT, say("12.")), [0.1, 0.7]),
        ((RIGHT_CALL, RESULT), [0.3]),
        ((RIGHT_CALL, RESULT, say("12."), say("12.")), [0.3, 0.0, 0.0]),
        ((say("12."), say("12.")), [0.0, 0.0]),
        ((), []),
    ],
)
def test_rewards_per_call_are_the_parts_of_the_reward(turns, parts):
    world = Calculator()
    outcome = world.score([*world.reset(TASK), *turns])
    assert outcome.rewards_per_call == pytest.approx(parts)
    assert sum(outcome.rewards_per_call) == pytest.approx(outcome.reward)


@pytest.mark.parametrize(
    ("answer", "share"), [("12.", 1.0), ("13.", 0.5 / 3), ("12", 1.0 / 3), ("12.5", 0.5), ("21.", 0.0), ("", 0.0)]
)
def test_partial_credit_counts_right_characters_from_the_first_on(answer, share):
    world = Calculator(partial=0.5)
    outcome = world.score([*world.reset(TASK), RIGHT_CALL, RESULT, say(answer)])
    assert outcome.rewards_per_call == pytest.approx([0.3, 0.7 * share])
    assert outcome.metrics == {"success": float(answer == "12.")}


def test_partial_credit_is_less_than_all():
    with pytest.raises(Problem, match=r"calculator\.partial=1 must be in \[0, 1\)"):
        Calculator(partial=1)
