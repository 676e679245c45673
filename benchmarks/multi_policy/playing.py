"""Episodes straight from engines, with no service in between, and what weights earn in them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from astraflow.config.rooms import build
from astraflow.config.schema import PolicySection, RunConfig
from astraflow.contracts import Engine, Workflow
from astraflow.engines.local import LocalEngine
from astraflow.models.chat import ChatTokenizer
from astraflow.rollout.context.trie import trajectories
from astraflow.types import Call, Outcome, Sampling, Task, Trajectory

Branches = Mapping[str, list[Trajectory]]
Rewards = Mapping[str, float]
EVALUATED = 256  # episodes, of each version
NO_TOOLS = 1e9  # of the workflow's `scale`: tools answer at once


@dataclass
class Said:
    """What a workflow gets for a reply."""

    content: str
    message: dict[str, Any]


class Speaker:
    """One policy: its engine, and how it is asked."""

    def __init__(self, name: str, section: PolicySection, engine: Engine) -> None:
        self.name, self.engine, self.chat = name, engine, ChatTokenizer(section.model)
        self.sampling = Sampling(max_tokens=section.sampling.max_tokens)


class Asking:
    """One policy as the workflow of one episode sees it; calls are kept."""

    base_url = api_key = ""

    def __init__(self, speaker: Speaker, episode: str) -> None:
        self._speaker, self._episode = speaker, episode
        self.calls: list[Call] = []

    async def chat(self, messages: Sequence[Any], **options: Any) -> Said:
        """One call."""
        speaker, index = self._speaker, len(self.calls)
        ids = np.asarray(speaker.chat.encode(speaker.chat.render(messages, None, True)), np.int32)
        request = f"{self._episode}/{speaker.name}/{index}"
        generation = await asyncio.wrap_future(speaker.engine.submit(request, ids, speaker.sampling))
        self.calls.append(Call(speaker.name, index, ids, generation))
        text = speaker.chat.decode(generation.token_ids)
        return Said(text, {"role": "assistant", "content": text})


async def play(
    workflow: Workflow, task: Task, speakers: Sequence[Speaker], episode: str
) -> tuple[Branches, Rewards]:  # fmt: skip
    """One episode: trajectories and rewards by policy."""
    llm = {speaker.name: Asking(speaker, episode) for speaker in speakers}
    outcome = await workflow(task, llm)
    if not isinstance(outcome, Outcome) or not isinstance(outcome.reward, dict):
        raise TypeError(f"{workflow!r} gave {outcome!r}; it must give a reward by policy")
    rewards = {name: outcome.reward[name] or 0.0 for name in llm}
    return {n: trajectories(a.calls, n, rewards[n]) for n, a in llm.items()}, rewards


def evaluate(
    config: RunConfig, versions: Iterable[Mapping[str, Mapping[str, Any]]], seed: int
) -> list[dict[str, float]]:
    """Mean reward by policy of each of `versions` (policy -> its weights), sampled as in training: the same number of
    episodes of every task. For all sides alike, after their clock has stopped."""
    engines = {
        name: LocalEngine(section.model, max_concurrency=EVALUATED, threads=1, seed=seed + 1000)
        for name, section in config.policies.items()
    }
    speakers = [Speaker(name, section, engines[name]) for name, section in config.policies.items()]
    source = build("sources", config.sources["train"].type, config.sources["train"].options, "sources.train")
    options = config.workflow.options | {"scale": NO_TOOLS}
    workflow = build("workflows", config.workflow.type, options, "workflow")
    tasks = [Task("train", i % len(source), 0, source.row(i % len(source))) for i in range(_rounded(len(source)))]

    async def means(number: int, weights: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        for name, engine in engines.items():
            await asyncio.wrap_future(engine.load_weights(number, weights[name]))
        played = (play(workflow, task, speakers, f"{number}/{i}") for i, task in enumerate(tasks))
        of_all = [rewards for _, rewards in await asyncio.gather(*played)]
        return {name: float(np.mean([rewards[name] for rewards in of_all])) for name in engines}

    async def all_of_them() -> list[dict[str, float]]:
        return [await means(number, weights) for number, weights in enumerate(versions, 1)]

    try:
        return asyncio.run(all_of_them())
    finally:
        for engine in engines.values():
            engine.close()


def _rounded(num_tasks: int) -> int:
    """The multiple of `num_tasks` that is nearest to EVALUATED."""
    return max(1, round(EVALUATED / num_tasks)) * num_tasks
