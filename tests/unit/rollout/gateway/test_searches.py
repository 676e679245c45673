"""What a search finds is never trained on: through the gateway, results are given tokens, whatever form they have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from astraflow.rollout.context.trie import full_sequence, trajectories
from astraflow.rollout.worker.client import Reply
from astraflow.types import Task
from astraflow.workflows.search_r1 import SearchR1
from astraflow.workflows.tool_use import ToolUse
from small_corpus import TASK, write_corpus

FOUND = "Red Harbor is a 1950 film directed by Ana Cole."


class OfWorld:
    """`llm["actor"]` over a gateway in this process."""

    def __init__(self, world: Any) -> None:
        self._world = world

    async def chat(self, messages: list[dict[str, Any]], **options: Any) -> Reply:
        completion = await self._world.ask(messages, **options)
        choice = completion.choices[0]
        return Reply(msgspec.to_builtins(choice.message), choice.finish_reason, {})


@pytest.mark.parametrize("form", ["tools", "tags"])
async def test_results_are_given_and_replies_are_sampled(
    make_world: Any, tmp_path: Any, monkeypatch: Any, form: str
) -> None:
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path / "cache"))
    options = {"index": {"corpus": str(write_corpus(tmp_path / "c.jsonl"))}, "topk": 1}
    world = make_world(max_context=5000)
    if form == "tools":
        said = ['<tool_call>{"name": "search", "arguments": {"query": "red harbor"}}</tool_call>', "3 May 1901"]
        play: Any = ToolUse(environment={"type": "search", **options})
    else:
        said = ["<think>hm</think><search>red harbor</search>", "<answer>3 May 1901</answer>"]
        play = SearchR1(environment=options)
    world.engine.say(*said)
    outcome = await play(Task("t", 0, 0, TASK), {"actor": OfWorld(world)})
    assert outcome.metrics["success"] == 1 and outcome.metrics["searches"] == 1
    calls = world.close()
    branches = trajectories(calls, "actor", 1.0)
    whole = world.chat.decode(full_sequence(branches, branches[-1].branch), skip_special_tokens=False)
    sampled = "".join(world.chat.decode(branch.token_ids[branch.loss_mask]) for branch in branches)
    assert FOUND in whole and "information" not in sampled and "Ana Cole" not in sampled
    assert sum(int(branch.loss_mask.sum()) for branch in branches) == sum(len(c.generation.token_ids) for c in calls)
    for text in said:
        assert text.split("</search>")[0].split("</answer>")[0] in sampled
