"""Random agents through the gateway: every sampled token is trained once, after exactly the ids that the engine saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.rollout.context.trie import full_sequence, trajectories
from chat_families import FAMILIES, Scene, check_prefixes, tool

WORDS = st.lists(st.sampled_from(["he·llo", "hello", "a", " ", "\n", "<think>t</think>", "é"]), max_size=3)
THEN = ("go on", "ask again", "rewrite", "drop", "error", "strip", "result")


class Turn(NamedTuple):
    """One or more calls at once with the same history, and what the agent makes of the first reply."""

    replies: list[list[str]]
    calls_tool: bool
    cut: bool  # by length, at half
    order: int  # of completion
    agent: str
    then: str


TURNS = st.lists(
    st.builds(
        Turn, st.lists(WORDS, min_size=1, max_size=3), st.booleans(), st.booleans(), st.integers(0, 2),
        st.sampled_from(["", "", "a", "b"]), st.sampled_from(THEN),
    ),
    min_size=1, max_size=5,
)  # fmt: skip


async def _play(scene: Scene, turns: list[Turn], offered: list[dict[str, Any]] | None) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    for turn in turns:
        shortest = min(scene.say("·".join(_words(scene, turn, words))) for words in turn.replies)
        options: dict[str, Any] = {"tools": offered}
        if turn.cut and shortest:
            options["max_tokens"] = (shortest + 1) // 2
        reply = (await _ask_all(scene, messages, turn, options))[0]
        messages = _next(messages, reply, turn.then)


def _words(scene: Scene, turn: Turn, words: list[str]) -> list[str]:
    return [*words, scene.call_text(f={"x": 1}, g={"x": "y"})] if turn.calls_tool else words


async def _ask_all(
    scene: Scene, messages: list[dict[str, Any]], turn: Turn, options: dict[str, Any]
) -> list[dict[str, Any]]:
    before, count = len(scene.engine.seen), len(turn.replies)
    scene.engine.hold()
    model = f"actor@{turn.agent}" if turn.agent else "actor"
    asks = [asyncio.ensure_future(scene.ask(messages, model, **options)) for _ in range(count)]
    while len(scene.engine.seen) < before + count:
        await asyncio.sleep(0)
    names = [request_id for request_id, _, _ in list(scene.engine.seen)[before:]]
    for number in range(count):
        scene.engine.step(999, names[(number + turn.order) % count])
    return list(await asyncio.gather(*asks))


def _next(messages: list[dict[str, Any]], reply: dict[str, Any], then: str) -> list[dict[str, Any]]:
    more = {"role": "user", "content": "more"}
    if then == "ask again":
        return messages
    if then == "rewrite":
        return [*messages, {"role": "assistant", "content": "rewritten"}, more]
    if then == "drop":
        return [*messages[:2], reply, more]
    if then == "error":
        return [*messages, reply, {"role": "user", "content": "error"}]
    if then == "strip":
        return [*messages, {**reply, "content": (reply.get("content") or "").split("</think>")[-1].strip()}, more]
    if then == "result":
        calls = reply.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
        return [*messages, reply, *(results or [more])]
    return [*messages, reply, more]


@given(TURNS, st.sampled_from(FAMILIES), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_agent_trains_each_sampled_token_once_after_the_ids_that_the_engine_saw(
    make_scene: Callable[[str], Scene], turns: list[Turn], family: str, with_tools: bool
) -> None:
    scene = make_scene(family)
    asyncio.run(_play(scene, turns, [tool("f"), tool("g")] if with_tools else None))
    seen = {request_id: ids for request_id, ids, _ in scene.engine.seen}
    sampled = int(scene.engine.stats()["sampled_tokens"])
    calls = scene.close()
    branches = trajectories(calls, "actor", 1.0)
    assert sum(int(branch.loss_mask.sum()) for branch in branches) == sampled
    check_prefixes(calls, branches, seen)
    for branch in branches:  # what the framework writes behind a cut reply is never trained
        own = {int(i) for i in branch.call_index if i >= 0}
        ends = {len(calls[i].prompt_ids) + len(calls[i].generation.token_ids) for i in own if _is_cut(calls[i])}
        for end in ends - {len(full_sequence(branches, branch.branch))}:
            assert not branch.loss_mask[end - branch.fork_at]


def _is_cut(call: Any) -> bool:
    return bool(call.generation.finish_reason == "length")
