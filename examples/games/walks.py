"""What a tiny model is shown of the frozen lake: walks by chance, told as the environment tells them."""

import random

from astraflow.environments.adapters.gymnasium import Gymnasium
from astraflow.types import Action, Task

MOVES = "ldru"  # left, down, right, up


class Walks:
    """Row i is a conversation: states as numbers, moves as letters. Right and down are as likely as `ahead` says."""

    def __init__(self, *, size: int = 3200, ahead: float = 0.7, longest: int = 10):
        self.size, self.ahead, self.longest = size, ahead, longest

    def __len__(self):
        return self.size

    def row(self, index):
        rng = random.Random(f"walk/{index}")
        lake = Gymnasium(id="FrozenLake-v1", options={"is_slippery": False}, actions=MOVES, show="state")
        told, messages = lake.reset(Task("walks", index, 0, {"seed": 0})), []
        for _ in range(self.longest):
            move = rng.choice("dr" if rng.random() < self.ahead else "lu")
            messages += [{"role": "user", "content": told}, {"role": "assistant", "content": move}]
            step = lake.step(Action(text=move))
            if step.done:
                break
            told = step.text
        return {"messages": messages}

    def fingerprint(self):
        return f"walks-{vars(self)}"
