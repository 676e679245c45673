"""Sums of one digit as plain text, what tiny models are shown of them, and a game: the tasks of this folder."""

import asyncio
import random

from astraflow.contracts import Environment
from astraflow.sources.code.snippets import SnippetsSource
from astraflow.types import Step


def share_of_digits(completion, task):
    """How much of the reply is digits, 0 to 1."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


async def choir(task, llm):
    """All policies at once, as many as there are; the one with number n earns the share of its letters in its reply."""

    async def sing(name):
        reply = await llm[name].chat([{"role": "user", "content": task["question"]}])
        text = reply.content or ""
        return name, sum(ord(c) % 8 == int(name[1:]) for c in text) / max(1, len(text))

    return dict(await asyncio.gather(*map(sing, llm)))


class Sums:
    """`3+4?`, answer `7`; no tool."""

    def __init__(self, *, size: int = 0):
        self.size = size or 100

    def __len__(self):
        return self.size

    def row(self, index):
        a, b = divmod(index * 37 % 100, 10)
        return {"question": f"{a}+{b}?", "answer": str(a + b)}

    def fingerprint(self):
        return f"{type(self).__name__}-{vars(self)}"


class Demos(Sums):
    """A conversation for each sum, which is as it should be with probability `right`, else drawn by chance.

    `of`: "answer"; "verdict": `3+4?7=` is answered by y or n; "route": s or l.
    """

    def __init__(self, *, of: str = "answer", right: float = 0.3, size: int = 6400):
        super().__init__(size=size)
        self.of, self.right = of, right

    def row(self, index):
        task, rng = super().row(index), random.Random(f"{self.of}/{index}")
        asked, said = task["question"], task["answer"]
        if self.of == "verdict":
            said = rng.choice("yn")
            asked += task["answer"] if said == "y" else str(rng.randrange(19))
        chance = {"answer": [str(n) for n in range(19)], "verdict": ["y", "n"], "route": ["s", "l"]}[self.of]
        if rng.random() >= self.right or self.of == "route":
            said = rng.choice(chance)
        if self.of != "answer":
            asked += {"verdict": "=", "route": "who?"}[self.of]
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


class Expected(Sums):
    """What a tester is shown: the beginning of a test, and what the function should give, else a number by chance."""

    def __init__(self, *, right: float = 0.5, size: int = 6400):
        super().__init__(size=size)
        self.right = right

    def row(self, index):
        rng = random.Random(f"expected/{index}")
        task = SnippetsSource().row(rng.randrange(100))
        said = task["tests"][0].removeprefix(task["test_stub"])
        if rng.random() >= self.right:
            said = str(rng.randrange(20))
        asked = f"{task['brief']} {task['test_stub']}"
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


class Piles(Sums):
    """Games of nim: a pile, and who begins."""

    def row(self, index):
        return {"pile": 4 + index % 5, "first": index // 5 % 2}


class Nim(Environment):
    """Take 1 to 3; who takes the last one wins, who says something else loses."""

    sides = 2

    def reset(self, task):
        self.pile = task["pile"]
        return Step(f"{self.pile}?", side=task["first"])

    def step(self, action):
        taken = int(action.text[0]) if action.text[:1] in ("1", "2", "3") else 0
        legal = 0 < taken <= self.pile
        self.pile -= taken if legal else 0
        if legal and self.pile:
            return Step(f"{self.pile}?", side=1 - action.side)
        winner = action.side if legal else 1 - action.side
        return Step("", [float(winner == side) for side in (0, 1)], done=True)
