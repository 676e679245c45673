"""Functions that are known by two examples alone, what tiny models are shown of them, and one policy that votes."""

import asyncio
import random
from collections import Counter

from astraflow.rewards.code import Code
from astraflow.sources.code.snippets import SnippetsSource
from astraflow.types import Outcome


class Functions:
    """`2 3=10 7 4=57`: write the f for which f(2, 3) is 10 and f(7, 4) is 57. Five tests that the question does not
    show say whether it is the right one.

    A fifth of the 288 functions is held out. `demos`: conversations about train functions, "code" or "test"; a share
    `right` of them is as it should be, the others are of another function.
    """

    def __init__(self, *, split="train", size=0, demos="", right=1.0):
        self._functions = SnippetsSource(split=split)
        self.split, self.size, self.demos, self.right = split, size or len(self._functions), demos, right

    def __len__(self):
        return self.size

    def row(self, index):
        rng = random.Random(f"{self.demos}/{index}")
        task = self._function(rng.randrange(len(self._functions)) if self.demos else index % len(self._functions))
        if not self.demos:
            return task
        shown = task if rng.random() < self.right else self._function(rng.randrange(len(self._functions)))
        asked, said = ("?", shown["code"]) if self.demos == "code" else (":", shown["wanted"])
        user = {"role": "user", "content": task["brief"] + asked}
        return {"messages": [user, {"role": "assistant", "content": said}]}

    def fingerprint(self):
        return f"functions-{self.split}-{self.size}-{self.demos}-{self.right}"

    def _function(self, index):
        row = self._functions.row(index)
        first, second = (test.partition(" == ")[2] for test in row["tests"][:2])
        stub = row["tests"][1].removesuffix(second)
        code = row["solution"].removeprefix(row["stub"]).strip()
        return {**row, "brief": f"2 3={first} 7 4={second}", "test_stub": stub, "wanted": second, "code": code}


class Vote:
    """One policy alone: of `n` codes the one that is written most often, the first of these, is its answer."""

    def __init__(self, *, n: int = 5, prompt: str = "{brief}?"):
        self._n, self._prompt, self._grade = n, prompt, Code()

    async def __call__(self, task, llm):
        (policy,) = llm
        question = [{"role": "user", "content": self._prompt.format_map(task.fields)}]
        agents = [f"{policy}@{number}" for number in range(self._n)]
        replies = await asyncio.gather(*(llm[policy].chat(question, model=agent) for agent in agents))
        codes = [(reply.content or "").strip() for reply in replies]
        grades = await asyncio.gather(*(self._grade(code, task) for code in codes))
        if any(grade.reward is None for grade in grades):
            return None
        chosen = grades[codes.index(Counter(codes).most_common(1)[0][0])]
        rewards = {agent: grade.reward for agent, grade in zip(agents, grades, strict=True)}
        return Outcome(reward=rewards, metrics={"success": chosen.reward})
