"""The calculator's tool and its reward."""

from __future__ import annotations

import pytest

from astraflow.environments.calculator import Calculator
from astraflow.errors import Problem
from astraflow.types import Action, Step, Task

TASK = Task("train", 0, 0, {"text": "3*4?", "answer": "12", "a": 3, "b": 4, "op": "*"})


def call(expr, turn=1, name="calc"):
    return Action(tool=name, arguments={"expr": expr}, finish_reason="tool_calls", turn=turn)


def say(content, finish_reason="stop", turn=2):
    return Action(text=content, finish_reason=finish_reason, turn=turn)


RIGHT_CALL = call("3*4")


def play(*actions, world=None):
    """The rewards of the steps, and the last step."""
    world = world or Calculator()
    assert world.reset(TASK) == "3*4?"
    steps = [world.step(action) for action in actions]
    assert not any(step.done for step in steps[:-1])
    return [step.reward for step in steps], steps[-1]


@pytest.mark.parametrize(("expr", "result"), [("3*4", "<12>"), ("2-9", "<-7>"), ("9+9", "<18>")])
def test_the_tool_evaluates_digit_operator_digit(expr, result):
    assert play(call(expr))[1].text == result


@pytest.mark.parametrize("expr", ["3*44", "3/4", "", "3*", "a*4", "3*4 ", "3**4", "\u0663*4", None, 34])
def test_an_invalid_expression_ends_without_reward(expr):
    assert play(call(expr))[1] == Step(done=True, metrics={"success": 0.0})


def test_an_unknown_tool_ends_too():
    assert play(call("3*4", name="search"))[1].done
    assert play(Action(tool="calc", arguments={"x": "3*4"}))[1].done


@pytest.mark.parametrize(
    ("actions", "parts", "success"),
    [
        ((RIGHT_CALL, say("12.")), [0.3, 0.7], 1.0),
        ((RIGHT_CALL, say(" 12. ")), [0.3, 0.7], 1.0),
        ((RIGHT_CALL, RIGHT_CALL, say("12.")), [0.3, 0.0, 0.7], 1.0),
        ((RIGHT_CALL, say("12")), [0.3, 0.0], 0.0),
        ((RIGHT_CALL, say("13.")), [0.3, 0.0], 0.0),
        ((RIGHT_CALL, say("12.", "length")), [0.3, 0.0], 0.0),
        ((RIGHT_CALL, call("3*4", 2)), [0.3, 0.0], 0.0),
        ((RIGHT_CALL, call("3*4", 2), say("12.", turn=3)), [0.3, 0.0, 0.0], 0.0),
        ((call("3*5"), say("12.")), [0.1 + 0.2 * 2 / 3, 0.7], 1.0),
        ((call("8-1"), say("7.")), [0.1, 0.0], 0.0),
        ((call("8-1"), say("12.")), [0.1, 0.7], 1.0),
        ((RIGHT_CALL, call("3*44")), [0.3, 0.0], 0.0),
        ((say("12.", turn=1),), [0.0], 0.0),
        ((say("12."),), [0.0], 0.0),
    ],
)
def test_rewards(actions, parts, success):
    rewards, last = play(*actions)
    assert rewards == pytest.approx(parts)
    assert last.metrics == {"success": success}
    assert last.done == (actions[-1].tool is None or actions[-1].arguments["expr"] == "3*44")


@pytest.mark.parametrize(
    ("answer", "share"), [("12.", 1.0), ("13.", 0.5 / 3), ("12", 1.0 / 3), ("12.5", 0.5), ("21.", 0.0), ("", 0.0)]
)
def test_partial_credit_counts_right_characters_from_the_first_on(answer, share):
    rewards, last = play(RIGHT_CALL, say(answer), world=Calculator(partial=0.5))
    assert rewards == pytest.approx([0.3, 0.7 * share])
    assert last.metrics == {"success": float(answer == "12.")}


def test_partial_credit_is_less_than_all():
    with pytest.raises(Problem, match=r"calculator\.partial=1 must be in \[0, 1\)"):
        Calculator(partial=1)
