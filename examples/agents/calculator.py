"""The task of all agents here: ask a calculator, then say what it said. `3*4?`, `calc("3*4")`, `<12>`, `12.`"""

import re

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Evaluate one sum, such as 3*4.",
            "parameters": {"type": "object", "properties": {"expr": {"type": "string"}}, "required": ["expr"]},
        },
    }
]


def calc(expr):
    """What the calculator says: `<12>`, or `<?>` if it is no sum of two digits."""
    sum_ = re.fullmatch(r"(\d)([-+*])(\d)", expr, re.ASCII)
    if sum_ is None:
        return "<?>"
    a, op, b = int(sum_[1]), sum_[2], int(sum_[3])
    return f"<{a + b if op == '+' else a - b if op == '-' else a * b}>"


def grade(task, calls, answer):
    """The reward: half for asking the sum of the task, by the characters that are right; half for what was said then.

    `calls`: what the calculator was asked, in order. `answer`: the last text.
    """
    if not calls or calc(calls[0]) == "<?>":
        return 0.0
    right = sum(a == b for a, b in zip(calls[0], task["text"], strict=False)) / 3
    return 0.5 * right + 0.5 * (answer == calc(calls[0]).strip("<>") + ".")
