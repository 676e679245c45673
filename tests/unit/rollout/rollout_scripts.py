"""What the scripted engine and the workers of the tests in this folder play. Imported by worker processes too."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np

from astraflow.errors import EpisodeError
from astraflow.types import Outcome

SYMBOLS = ("<pad>", "<bos>", "<eos>", *"0123456789abcdefghijklmnopqrstuvwxyz+-*=()[]<>:?. \nUDLRGSX#")
IDS = {symbol: i for i, symbol in enumerate(SYMBOLS)}
EOS = IDS["<eos>"]


def ids(text: str) -> list[int]:
    return [IDS[c] for c in text]


def text(token_ids) -> str:
    return "".join(SYMBOLS[i] for i in token_ids)


def right_calls(prompt: np.ndarray, number: int) -> list[int]:
    """Plays the calculator perfectly: `3*4?` -> `[3*4]`, `<12>` -> `12.`"""
    seen = text(prompt)
    said = seen[seen.rindex("<", 0, -1) + 1 : -1] + "." if seen.endswith(">") else f"[{seen[-4:-1]}]"
    return [*ids(said), EOS]


async def ask_once(task, llm):
    reply = await llm["actor"].chat([{"role": "user", "content": task["text"]}])
    return float(len(reply.content))


async def play_by_kind(task, llm):
    """What the task's field `kind` says."""
    kind = task["kind"]
    if kind == "raise":
        raise KeyError("boom")
    if kind == "hang":
        await asyncio.sleep(3600)
    if kind == "block":
        time.sleep(3600)  # noqa: ASYNC251
    if kind == "stubborn":
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
    if kind == "nan":
        return float("nan")
    if kind == "text":
        return "good"
    if kind == "outcome":
        await llm["actor"].chat([{"role": "user", "content": "1+1?"}])
        return Outcome(reward={"actor": 0.5}, rewards_per_call=[0.25], metrics={"success": 1.0})
    if kind == "none":
        await llm["actor"].chat([{"role": "user", "content": "1+1?"}])
        return None
    if kind == "silent":
        return 1.0
    if kind == "odd_numbers":
        await llm["actor"].chat([{"role": "user", "content": "1+1?"}])
        return Outcome(reward=np.float32(0.5), rewards_per_call={"actor": (np.float64(1),)}, metrics={"big": 10**30})
    if kind == "odd_text":
        raise ValueError("half a pair: \udcff")
    if kind == "odd_kind":
        raise EpisodeError("Judge! went wrong")
    if kind == "odd_error":
        raise EpisodeError("judge: half a pair: \udcff")
    if kind == "openai":
        completion = await llm["actor"].chat.completions.create(
            model="actor", messages=[{"role": "user", "content": "1+1?"}]
        )
        return float(len(completion.choices[0].message.content) + completion.usage.completion_tokens)
    if kind == "unknown_policy":
        await llm["actor"].chat([{"role": "user", "content": "1+1?"}])
        return {"judge": 1.0}
    if kind == "stream":
        await llm["actor"].chat([{"role": "user", "content": "1+1?"}], stream=True)
    if kind == "overlong":
        await llm["actor"].chat([{"role": "user", "content": "1" * 5000}])
    if kind == "give_up":
        try:
            await asyncio.wait_for(llm["actor"].chat([{"role": "user", "content": "9+9?"}]), 0.05)
        except TimeoutError:
            reply = await llm["actor"].chat([{"role": "user", "content": "1+1?"}])
            return float(len(reply.content))
    raise AssertionError(kind)


def blocking_reward(task):
    """Blocks whatever runs it until the file `released` is there."""
    deadline = time.monotonic() + 30.0
    while not Path(task["released"]).exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody released the reward")
        time.sleep(0.01)
    return 1.0


async def graded_by_one_that_blocks(task, llm):
    await llm["actor"].chat([{"role": "user", "content": "1+1?"}])
    return blocking_reward(task) if task["released"] else 0.5


def graded_by_one_that_blocks_in_a_thread(task, llm):
    llm["actor"].chat([{"role": "user", "content": "1+1?"}])
    return blocking_reward(task) if task["released"] else 0.5


def in_a_thread(task, llm):
    """A workflow that is a plain function."""
    if task["kind"] == "block":
        time.sleep(3600)
    return float(len(llm["actor"].chat([{"role": "user", "content": "1+1?"}]).content))
