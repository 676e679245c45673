"""Environments that behave, hang, crash and lie, as tests of pools and of conformance need them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

from astraflow.contracts import Environment
from astraflow.types import Action, Message, Step, Task


class Counter(Environment):
    """Count up to `goal` by saying the next number."""

    def __init__(self, *, goal: int = 3) -> None:
        self.goal = goal

    def reset(self, task: Task) -> str:
        self.number = task.get("start", 0)
        return f"{self.number}?"

    def step(self, action: Action) -> Step:
        right = action.text == str(self.number + 1)
        self.number += right
        done = not right or self.number == self.goal
        return Step(f"{self.number}?", float(self.number == self.goal), done, {"reached": float(self.number)})


class HeavyCounter(Counter):
    """In a process; some texts are faults."""

    runs = "cpu"

    def step(self, action: Action) -> Step:
        match action.text:
            case "hang":
                time.sleep(600)
            case "hang in C":
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                time.sleep(600)
            case "crash":
                os._exit(3)
            case "raise":
                raise RuntimeError("no disk")
            case "garbage":
                return {"text": 7}  # type: ignore[return-value]
            case "pid":
                return Step(str(os.getpid()))
        return super().step(action)


class Waits(Environment):
    """A service that answers late, or fails."""

    runs = "service"
    closed = 0

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "system", "content": "wait"}, {"role": "user", "content": "?"}]

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(600 if action.text == "hang" else 0)
        return Step("waited", 1.0, done=True)

    async def close(self) -> None:
        Waits.closed += 1


class Blocks(Environment):
    """Says that it waits for a service, and blocks."""

    runs = "service"

    def reset(self, task: Task) -> str:
        return "?"

    def step(self, action: Action) -> Step:
        return Step(done=True)


class Hashes(Counter):
    """Tells something that differs from process to process."""

    def reset(self, task: Task) -> str:
        super().reset(task)
        return str(hash("text"))


class Chance(Counter):
    """Draws from the chance of its process."""

    def reset(self, task: Task) -> str:
        super().reset(task)
        return str(random.random())
