"""One episode of several policies, played through the gateway on engines that say what a script says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from astraflow.config.schema import WorkflowSection
from astraflow.engines.scripted import ScriptedEngine
from astraflow.models.chat import ChatTokenizer
from astraflow.rollout.context.credit import rewarded
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import parser_for
from astraflow.rollout.worker.client import LLM
from astraflow.types import EpisodeLease, Outcome, Sampling, Task
from astraflow.workflows.load import build_workflow

Say = Callable[[str], str] | Sequence[str]
QUESTION = Task("train", 0, 0, {"question": "3+4?", "answer": "7"})


class Table:
    """One episode. `told`: what each policy was asked, in order; `rewards`: of each policy and call, as committed."""

    def __init__(self, chat: ChatTokenizer, **policies: Say) -> None:
        self.chat, self.policies = chat, policies
        self.told: dict[str, list[str]] = {name: [] for name in policies}

    def _engine(self, name: str, say: Say) -> ScriptedEngine:
        def reply(prompt: Any, number: int) -> list[int]:
            self.told[name].append(self.chat.decode(prompt.tolist(), skip_special_tokens=True))
            text = say(self.told[name][-1]) if callable(say) else say[number]
            return [*self.chat.encode(text), *self.chat.eos_ids[:1]]

        return ScriptedEngine(reply, max_context=512)

    async def play(self, play: Any, task: Task = QUESTION) -> Outcome:
        endpoints = {
            name: PolicyEndpoint(self._engine(name, say), self.chat, parser_for("auto", self.chat, "tool_parser"))
            for name, say in self.policies.items()
        }
        gateway = Gateway(endpoints)
        lease = EpisodeLease(
            episode_id="train/0/0/0", group_id="train/0/0", attempt=1, task=task, timeout_s=9.0, min_versions={},
            sampling=dict.fromkeys(self.policies, Sampling()),
        )  # fmt: skip
        key = gateway.open_episode(lease)
        llm = {name: LLM(name, lambda body: gateway.answer(key, body), "", key) for name in self.policies}
        outcome: Outcome = await play(task, llm)
        branches = rewarded(gateway.close_episode(key).calls, outcome)  # as the runner commits it
        self.rewards = {t.policy: t.reward for t in branches}
        self.per_call = {t.policy: t.rewards_per_call for t in branches}
        return outcome


def built(type_name: str, policies: Sequence[str], **options: Any) -> Any:
    return build_workflow(WorkflowSection.model_validate({"type": type_name, **options}), policies)
