"""What agents do, the same for every family of templates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from chat_families import Scene, tool

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
LESS = {"role": "user", "content": "less"}


async def linear(scene: Scene) -> None:
    """Three turns; the first reply has tokens that the tokenizer would not choose."""
    for text in ("he·llo", "b", "c"):
        scene.say(text)
    messages = [HI]
    for _ in range(2):
        messages = [*messages, await scene.ask(messages), MORE]
    await scene.ask(messages)


async def fork(scene: Scene) -> None:
    """Two follow-ups of one reply, and one that goes on from the second."""
    for text in ("a", "b", "c", "d"):
        scene.say(text)
    messages = [HI, await scene.ask([HI])]
    await scene.ask([*messages, MORE])
    messages = [*messages, LESS]
    await scene.ask([*messages, await scene.ask(messages), MORE])


async def parallel(scene: Scene) -> None:
    """Two calls at once that end in the other order, then a follow-up of each, the later one first."""
    for text in ("a", "b", "c", "d"):
        scene.say(text)
    scene.engine.hold()
    asks = [asyncio.ensure_future(scene.ask([HI])) for _ in range(2)]
    while len(scene.engine.seen) < 2:
        await asyncio.sleep(0)
    names = [request_id for request_id, _, _ in scene.engine.seen]
    for number in (1, 0):
        scene.engine.step(99, names[number])
        await asks[number]
    scene.engine.release()
    for number in (1, 0):
        await scene.ask([HI, asks[number].result(), MORE])


async def retry(scene: Scene) -> None:
    """An answer is refused, asked for again with the error, and the error is then taken out of the history."""
    for text in ("bad", "ok", "c"):
        scene.say(text)
    refused = await scene.ask([HI])
    mended = await scene.ask([HI, refused, {"role": "user", "content": "error"}])
    await scene.ask([HI, mended, MORE])


async def thinking(scene: Scene) -> None:
    """A reply that thinks, then two more turns."""
    for text in ("<think>t</think>a", "<think>u</think>b", "c"):
        scene.say(text)
    messages = [HI]
    for _ in range(2):
        messages = [*messages, await scene.ask(messages), MORE]
    await scene.ask(messages)


async def tools(scene: Scene) -> None:
    """A turn with two tool calls and their results, and another turn."""
    offered = [tool("f"), tool("g")]
    scene.say(scene.call_text(f={"x": 1}, g={"x": 2}))
    scene.say("b")
    scene.say("c")
    called = await scene.ask([HI], tools=offered)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": str(number)}
        for number, call in enumerate(called["tool_calls"], 3)
    ]
    messages = [HI, called, *results]
    await scene.ask([*messages, await scene.ask(messages, tools=offered), MORE], tools=offered)


async def system(scene: Scene) -> None:
    """Two turns after a system message."""
    scene.say("a")
    scene.say("b")
    messages = [{"role": "system", "content": "be"}, HI]
    await scene.ask([*messages, await scene.ask(messages), MORE])


async def truncated(scene: Scene) -> None:
    """A reply cut by length, and a follow-up."""
    cut = scene.say("unfini")
    scene.say("b")
    await scene.ask([HI, await scene.ask([HI], max_tokens=cut), MORE])


async def identical(scene: Scene) -> None:
    """The same prompt and the same reply twice, then a follow-up of that."""
    for text in ("a", "a", "c"):
        scene.say(text)
    await scene.ask([HI])
    await scene.ask([HI, await scene.ask([HI]), MORE])


async def two_agents(scene: Scene) -> None:
    """Two agents of one policy say and hear the same; each goes on by itself."""
    for text in ("a", "a", "b", "b"):
        scene.say(text)
    first, second = [await scene.ask([HI], f"actor@{name}") for name in ("planner", "coder")]
    for reply, name in ((first, "planner"), (second, "coder")):
        await scene.ask([HI, reply, MORE], f"actor@{name}")


PLAYS: dict[str, Callable[[Scene], Awaitable[Any]]] = {
    play.__name__: play
    for play in (linear, fork, parallel, retry, thinking, tools, system, truncated, identical, two_agents)
}
