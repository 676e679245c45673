"""A search agent that acts by tags in its text, in the form of Search-R1 (arXiv:2503.09516)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from astraflow.environments.worlds import ENV_TIMEOUT_S, World
from astraflow.types import Action, Message, Step
from astraflow.workflows.questions import user
from astraflow.workflows.tally import Tally
from astraflow.workflows.tool_use import ToolUse

PROMPT = (
    "Answer the question. Think first, between <think> and </think>. If you lack knowledge, search by "
    "<search>words</search>; what is found comes between <information> and </information>. Search as often as you "
    "need. At last write the answer alone, in a few words: <answer>Beijing</answer>.\nQuestion: {question}"
)
AGAIN = "That was neither <search>words</search> nor <answer>answer</answer>. Try again."
STOPS = ["</search>", "</answer>"]
_TAG = re.compile(r"<(search|answer)>((?:(?!</?(?:search|answer)>).)*)(?:</\1>\s*)?\Z", re.DOTALL)


class SearchR1(ToolUse):
    """Each reply ends at `</search>`, and the results are the next message, or at `</answer>`.

    Results are messages that nobody sampled, so they are never trained on. A budget that is spent ends the episode with
    the rewards so far.
    """

    def __init__(
        self, *, environment: Mapping[str, Any] | None = None, max_turns: int = 5, max_sampled_tokens: int = 0,
        max_context_tokens: int = 0, max_wall_s: float = 0.0, env_timeout_s: float = ENV_TIMEOUT_S,
        pool: Mapping[str, Any] | None = None, policy: str | None = None,
    ) -> None:  # fmt: skip
        """`environment`: options of `search`, or another one (`type`) with its tool. The others: as of `tool_use`."""
        super().__init__(
            environment={"type": "search", "prompt": PROMPT, **(environment or {})}, max_turns=max_turns,
            max_sampled_tokens=max_sampled_tokens, max_context_tokens=max_context_tokens, max_wall_s=max_wall_s,
            env_timeout_s=env_timeout_s, pool=pool, policy=policy,
        )  # fmt: skip

    def _options(self, world: World) -> dict[str, Any]:
        return {"stop": STOPS}

    async def _act(self, world: World, tally: Tally, reply: Any) -> list[Message]:
        action = _action(reply.content or "", reply.finish_reason, tally.turn())
        step = Step(AGAIN) if action is None else await world.step(action)
        tally.add(step)
        tally.metrics["malformed"] = tally.metrics.get("malformed", 0.0) + (action is None)
        return [_told(step, action)]


def _action(text: str, finish_reason: str, turn: int) -> Action | None:
    """What a reply up to its stop does, by its last tag; None: there is none, or it was cut."""
    found = _TAG.search(text)
    if found is None or finish_reason == "length":
        return None
    if found[1] == "answer":
        return Action(text=found[2].strip(), finish_reason=finish_reason, turn=turn)
    return Action(
        text=text, tool="search", arguments={"query": found[2].strip()}, finish_reason=finish_reason, turn=turn
    )


def _told(step: Step, action: Action | None) -> Message:
    return user(step.text if action is None else f"<information>\n{step.text}\n</information>")
