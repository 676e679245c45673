"""A policy of a service elsewhere, as agents of an episode meet it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import PolicySection
from astraflow.errors import GatewayError, Problem
from astraflow.models.remote.transcript import Transcript
from astraflow.rollout.gateway.calls.events import Text
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import ChatRequest, RawRequest
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import HermesParser
from astraflow.rollout.policies import PolicyOptions, Weights, start_policy
from astraflow.types import EpisodeLease, Sampling, Task
from astraflow.weights.client import WeightClient
from fake_service import FakeService

TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
LEASE = EpisodeLease(
    episode_id="train/0/7/0", group_id="train/0/7", attempt=1, task=Task("train", 7, 0, {}), timeout_s=60.0,
    min_versions={}, sampling={"judge": Sampling(temperature=0.0, max_tokens=64)},
)  # fmt: skip


@pytest.fixture
def service() -> Iterator[FakeService]:
    made = FakeService()
    yield made
    made.close()


def section(service: FakeService, **engine: Any) -> PolicySection:
    given = {"model": "judge-large", "frozen": True, "engine": {"type": "remote", "url": service.url, **engine}}
    return PolicySection.model_validate(given)


async def started(service: FakeService, tmp_path: Path, **engine: Any) -> PolicyEndpoint:
    client = WeightClient(None)
    options = PolicyOptions(tmp_path, 0, "node", 8, 1)
    try:
        return await start_policy("judge", section(service, **engine), options, Weights("judge", client, lambda: None))
    finally:
        client.close()


@pytest.fixture
async def endpoint(service: FakeService, tmp_path: Path) -> AsyncIterator[PolicyEndpoint]:
    made = await started(service, tmp_path)
    yield made
    await asyncio.to_thread(made.engine.close)


def request(text: str | list[Any], **options: Any) -> ChatRequest:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return ChatRequest(model="judge", messages=messages, **options)


async def test_a_conversation_with_tools_is_one_sequence_of_characters(
    endpoint: PolicyEndpoint, service: FakeService
) -> None:
    assert isinstance(endpoint.tool_parser, HermesParser)
    gateway = Gateway({"judge": endpoint})
    key = gateway.open_episode(LEASE)
    service.replies.append({"content": "I look.", "calls": [("calc", '{"expr": "1+1"}')]})
    service.replies.append({"content": "It is 2: good."})
    messages: list[Any] = [{"role": "user", "content": "1+1?"}]
    first = (await gateway.chat(key, request(messages, tools=[TOOL]))).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content == "I look."
    (call,) = first.message.tool_calls  # type: ignore[misc]
    assert (call.function.name, call.function.arguments) == ("calc", '{"expr":"1+1"}')
    sent = {"id": call.id, "type": "function", "function": {"name": "calc", "arguments": call.function.arguments}}
    messages += [
        {"role": "assistant", "content": "I look.", "tool_calls": [sent]},
        {"role": "tool", "content": "2", "tool_call_id": call.id},
    ]
    second = (await gateway.chat(key, request(messages, tools=[TOOL]))).choices[0]
    assert second.message.content == "It is 2: good." and second.finish_reason == "stop"
    assert service.seen[1]["messages"] == messages and service.seen[1]["tools"] == [TOOL]
    calls = gateway.close_episode(key).calls["judge"]
    before = [*calls[0].prompt_ids.tolist(), *calls[0].generation.token_ids.tolist()]
    assert calls[1].prompt_ids.tolist()[: len(before)] == before and not calls[1].forked
    assert "It is 2: good." in Transcript().decode(calls[1].generation.token_ids), "kept with the episode"


async def test_stops_choices_and_streams(endpoint: PolicyEndpoint, service: FakeService) -> None:
    gateway = Gateway({"judge": endpoint})
    key = gateway.open_episode(LEASE)
    service.reply = lambda body: {"content": "mark: 7. Because it is short."}
    stopped = (await gateway.chat(key, request("a", stop=[". Because"]))).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("mark: 7", "stop")
    single = (await gateway.chat(key, request("a", stop=":"))).choices[0]
    assert (single.message.content, single.finish_reason) == ("mark", "stop")
    both = await gateway.chat(key, request("b", n=2))
    assert [choice.message.content for choice in both.choices] == ["mark: 7. Because it is short."] * 2
    pieces = [event.text async for event in gateway.stream(key, request("c")) if isinstance(event, Text)]
    assert "".join(pieces) == "mark: 7. Because it is short."
    assert len(gateway.close_episode(key).calls["judge"]) == 5


async def test_a_service_that_fails_is_an_error_of_the_call(endpoint: PolicyEndpoint, service: FakeService) -> None:
    gateway = Gateway({"judge": endpoint})
    key = gateway.open_episode(LEASE)
    service.replies.append({"status": 400, "body": b"no such model"})
    with pytest.raises(GatewayError, match="no such model") as caught:
        await gateway.chat(key, request("a"))
    assert caught.value.status == 503
    with pytest.raises(GatewayError, match="takes no raw prompts"):
        await gateway.chat(key, RawRequest(model="judge", messages=[], prompt="Once upon"))
    assert (await gateway.chat(key, request("a"))).choices[0].message.content == "well"


async def test_options_that_are_none_name_the_setting(service: FakeService, tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"policies.judge.engine.key_env=NOT_SET_ANYWHERE is not set"):
        await started(service, tmp_path, key_env="NOT_SET_ANYWHERE")
