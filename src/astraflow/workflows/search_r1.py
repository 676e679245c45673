"""A search agent that acts by tags in its text, in the form of Search-R1 (arXiv:2503.09516)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.environments.worlds import ENV_TIMEOUT_S, World, Worlds
from astraflow.errors import EpisodeError
from astraflow.types import Action, Message, Outcome, Step, Task, error_kind
from astraflow.workflows.load import choose_policy
from astraflow.workflows.questions import user
from astraflow.workflows.roles import ByRoles, at_least
from astraflow.workflows.tally import Budget, Tally

PROMPT = (
    "Answer the question. Think first, between <think> and </think>. If you lack knowledge, search by "
    "<search>words</search>; what is found comes between <information> and </information>. Search as often as you "
    "need. At last write the answer alone, in a few words: <answer>Beijing</answer>.\nQuestion: {question}"
)
AGAIN = "That was neither <search>words</search> nor <answer>answer</answer>. Try again."
STOPS = ["</search>", "</answer>"]
_TAG = re.compile(r"<(search|answer)>((?:(?!</?(?:search|answer)>).)*)(?:</\1>\s*)?\Z", re.DOTALL)


class SearchR1(ByRoles):
    """Each reply ends at `</search>`, and the results are the next message, or at `</answer>`.

    Results are messages that nobody sampled, so they are never trained on. A budget that is spent ends the episode with
    the rewards so far: replies, sampled tokens, and tokens of the context.
    """

    def __init__(
        self, *, environment: Mapping[str, Any] | None = None, max_turns: int = 5, max_sampled_tokens: int = 0,
        max_context_tokens: int = 0, env_timeout_s: float = ENV_TIMEOUT_S, policy: str | None = None,
    ) -> None:  # fmt: skip
        """`environment`: options of `search`, or another one (`type`) with its tool. 0: no such limit. `policy`: who
        plays; needed with several policies."""
        super().__init__({"policy": policy} if policy is not None else {})
        at_least("max_turns", max_turns, 1, "use 2 for one search and an answer")
        at_least("max_sampled_tokens", max_sampled_tokens, 0, "use 0 for no limit")
        self._max_context = at_least("max_context_tokens", max_context_tokens, 0, "use 0 for no limit")
        self._limits, self._policy = (max_turns, max_sampled_tokens, 0.0), policy
        spec = {"type": "search", "prompt": PROMPT, **(environment or {})}
        self._worlds = Worlds(spec, env_timeout_s=env_timeout_s)

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        world = self._worlds.open()
        try:
            return await self._play(task, world, choose_policy(llm, self._policy))
        finally:
            await world.close()

    async def _play(self, task: Task, world: World, client: LLM) -> Outcome:
        tally, budget, malformed, context = Tally(), Budget(*self._limits), 0, 0
        messages, _ = await world.reset(task)
        while not (tally.done or budget.spent or 0 < self._max_context <= context):
            try:
                reply = await client.chat(messages, stop=STOPS, **budget.options())
            except EpisodeError as error:
                if error_kind(str(error)) == "overlong" and tally.turns:
                    break
                raise
            budget.replied(reply.usage)
            context = int(reply.usage.get("total_tokens") or 0)
            messages.append(reply.message)
            action = _action(reply.content or "", reply.finish_reason, tally.turn())
            malformed += action is None
            step = Step(AGAIN) if action is None else await world.step(action)
            tally.add(step)
            messages.append(_told(step, action))
        tally.metrics["malformed"] = float(malformed)
        return tally.outcome(self._policy)


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
