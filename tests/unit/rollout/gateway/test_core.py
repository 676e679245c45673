"""The gateway core: keys, sampling, limits, failures, cancellation, capture."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from astraflow.errors import EngineError, GatewayError, ModelError
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import ChatRequest
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import NoParser
from astraflow.types import Sampling

USER = {"role": "user", "content": "hi"}


async def refused(awaitable: Any) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await awaitable
    return caught.value


async def test_a_call_is_captured_exactly(world: Any) -> None:
    world.engine.say("yes")
    reply = await world.ask([USER])
    (call,) = world.close()
    request_id, prompt, _ = world.engine.requests[0]
    assert (call.policy, call.index, call.forked) == ("actor", 0, False)
    assert call.prompt_ids.tolist() == prompt
    assert call.generation.logprobs.tolist() == [-1.0] * 4
    assert call.generation.versions.tolist() == [3] * 4
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.logprobs) == ("yes", "stop", None)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 4 == len(prompt) + 4
    assert reply.id == f"chatcmpl-{request_id}" and reply.model == "actor"


async def test_each_episode_has_its_own_unguessable_key(world: Any, fakes: Any) -> None:
    keys = {world.gateway.open_episode(fakes.lease()) for _ in range(100)}
    assert len(keys) == 100 and all(len(key) >= 32 for key in keys)


async def test_an_unknown_key_is_401_and_a_closed_one_410(world: Any) -> None:
    world.engine.say("a")
    request = ChatRequest(model="actor", messages=[USER])
    error = await refused(world.gateway.chat("af-guess", request))
    assert (error.status, error.code) == (401, "invalid_api_key")
    world.close()
    assert (await refused(world.gateway.chat(world.key, request))).status == 410
    with pytest.raises(GatewayError):
        world.close()
    assert world.engine.requests == []


async def test_an_unknown_policy_is_404_and_names_the_known_ones(world: Any) -> None:
    error = await refused(world.ask([USER], model="gpt-4o"))
    assert error.status == 404 and error.code == "model_not_found"
    assert str(error) == "model=gpt-4o is not a policy of this episode; known: actor"


async def test_the_leases_sampling_wins_and_another_wish_is_counted(make_world: Any) -> None:
    base = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=64)
    world = make_world(sampling={"actor": base})
    world.engine.say("a", "b", "c", "d", "e")
    await world.ask([USER])
    await world.ask([USER], temperature=0.7, top_p=0.9, top_k=5)
    assert world.gateway.stats()["gateway/sampling_overridden"] == 0
    for wish in ({"temperature": 0.0}, {"top_p": 1.0}, {"top_k": 0}):
        await world.ask([USER], **wish)
    assert world.gateway.stats()["gateway/sampling_overridden"] == 3
    assert all(sampling == base for _, _, sampling in world.engine.requests)


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({}, 64),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_tokens": 65}, 64),
    ],
)
async def test_an_agent_may_ask_for_fewer_tokens_only(world: Any, wish: dict[str, int], expected: int) -> None:
    world.engine.say("a")
    await world.ask([USER], **wish)
    assert world.engine.requests[0][2].max_tokens == expected


async def test_the_context_limits_the_new_tokens(make_world: Any) -> None:
    size = len(make_world().chat.encode("<s><|user|>hi</s>\n<|assistant|>"))
    world = make_world(max_context=size + 3)
    world.engine.say("a")
    await world.ask([USER])
    assert world.engine.requests[0][2].max_tokens == 3


@pytest.mark.parametrize(("over", "served"), [(-1, True), (0, False), (1, False)])
async def test_overlong_prompts_are_measured_after_templating_with_tools(
    make_world: Any, fakes: Any, over: int, served: bool
) -> None:
    tools = [fakes.tool("f", x="string")]
    chat = fakes.FakeChat()
    length = len(chat.encode(chat.render([USER], tools, add_generation_prompt=True)))
    world = make_world(max_context=length - over)
    world.engine.say("a")
    if served:
        await world.ask([USER], tools=tools)
        assert world.engine.requests[0][2].max_tokens == 1
        return
    error = await refused(world.ask([USER], tools=tools))
    assert (error.status, error.code, error.value) == (400, "context_length_exceeded", length)
    assert f"this model's maximum context length is {length - over} tokens" in str(error)
    capture = world.gateway.close_episode(world.key)
    assert (world.gateway.stats()["gateway/overlong"], capture.calls["actor"]) == (1, [])
    assert world.gateway.stats()["gateway/overlong"] == 1


@pytest.mark.parametrize(
    "wish",
    [
        {"n": 129},
        {"n": 0},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"top_logprobs": 3},
        {"response_format": {"type": "json_object"}},
        {"max_tokens": 0},
        {"stop": ""},
        {"stop": ["a"] * 17},
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(world: Any, wish: dict[str, Any]) -> None:
    error = await refused(world.ask([USER], **wish))
    assert error.status == 400 and error.thing == next(iter(wish))
    assert world.engine.requests == []


async def test_harmless_options_are_accepted(world: Any) -> None:
    world.engine.say("a")
    await world.ask([USER], n=1, tool_choice="auto", top_logprobs=0, response_format={"type": "text"}, stop=[])
    assert len(world.close()) == 1


async def test_a_seed_is_mixed_with_the_episode_in_training_and_kept_in_evaluation(make_world: Any) -> None:
    seeds = []
    for changes in ({}, {}, {"episode_id": "train/0/7/1"}, {"attempt": 2}, {"purpose": "eval"}):
        world = make_world(**changes)
        world.engine.say("a")
        await world.ask([USER], seed=42)
        seeds.append(world.engine.requests[0][2].seed)
    assert seeds[0] == seeds[1] and len(set(seeds)) == 4 and seeds[4] == 42


async def test_tool_calls_are_read_only_when_tools_were_offered_and_wanted(world: Any, fakes: Any) -> None:
    text = 'so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    world.engine.say(text, text, text)
    tools = [fakes.tool("f", x="integer")]
    reply = (await world.ask([USER], tools=tools)).choices[0]
    assert (reply.finish_reason, reply.message.content) == ("tool_calls", "so")
    assert reply.message.tool_calls[0].id == "call_0_0"
    for options in ({}, {"tools": tools, "tool_choice": "none"}):
        reply = (await world.ask([USER], **options)).choices[0]
        assert (reply.finish_reason, reply.message.content) == ("stop", text)
        assert not reply.message.tool_calls


async def test_a_reply_cut_by_length_says_so(world: Any) -> None:
    world.engine.cut("ab")
    assert (await world.ask([USER])).choices[0].finish_reason == "length"
    assert world.close()[0].generation.finish_reason == "length"


async def test_a_stop_string_ends_the_reply_and_the_sampled_tokens_up_to_it_are_kept(world: Any) -> None:
    world.engine.say("one END two", "next")
    reply = await world.ask([USER], stop=["END", "never"])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("one ", "stop")
    message = {"role": "assistant", "content": "one "}
    await world.ask([USER, message, USER], stop="x")
    assert world.prompt_text() == "<s><|user|>hi</s>\n<|assistant|>one END</s>\n<|user|>hi</s>\n<|assistant|>"
    first, second = world.close()
    assert world.chat.decode(first.generation.token_ids, skip_special_tokens=False) == "one END"
    assert len(first.generation.logprobs) == len(first.generation.versions) == len("one END")
    assert not second.forked
    assert world.chat.decode(second.generation.token_ids, skip_special_tokens=False) == "nex"


async def test_a_stop_string_of_one_token_stops_the_engine(world: Any, fakes: Any) -> None:
    world.engine.say("a", "b")
    await world.ask([USER], stop=["END", "hello"])
    assert world.engine.requests[0][2].stop_token_ids == (fakes.IDS["hello"],)
    await world.ask([USER])
    assert world.engine.requests[1][2].stop_token_ids == ()


async def test_a_stop_token_of_the_lease_is_not_shown(make_world: Any, fakes: Any) -> None:
    world = make_world(sampling={"actor": Sampling(stop_token_ids=(fakes.IDS["!"],))})
    world.engine.script.append((world.chat.encode("ab!"), "stop"))
    assert (await world.ask([USER])).choices[0].message.content == "ab"
    assert len(world.close()[0].generation.token_ids) == 3


async def test_logprobs_and_token_ids_are_given_on_request(world: Any, fakes: Any) -> None:
    world.engine.say("ab")
    reply = await world.ask([USER], logprobs=True, return_token_ids=True)
    choice = reply.choices[0]
    assert [row.token for row in choice.logprobs.content][:2] == ["a", "b"]
    assert [row.logprob for row in choice.logprobs.content] == [-1.0] * 3
    assert choice.logprobs.content[0].bytes == [97] and choice.logprobs.content[0].top_logprobs == []
    assert choice.token_ids == [fakes.IDS["a"], fakes.IDS["b"], fakes.EOS]
    assert reply.prompt_token_ids == world.engine.requests[0][1]


async def test_an_engine_failure_is_503_and_not_captured(world: Any) -> None:
    world.engine.script.append(EngineError("engine", "down", "is closed", "restart the node"))
    error = await refused(world.ask([USER]))
    assert error.status == 503 and "is closed" in str(error)
    world.engine.script.append(([1], "error"))
    assert (await refused(world.ask([USER]))).status == 503
    world.engine.say("a")
    await world.ask([USER])
    capture = world.gateway.close_episode(world.key)
    assert world.gateway.stats()["gateway/engine_failures"] == 2
    assert [call.index for call in capture.calls["actor"]] == [0]  # dense: one reward per answered call


async def test_closing_cancels_what_runs(world: Any) -> None:
    running = asyncio.ensure_future(world.ask([USER]))
    await asyncio.sleep(0)
    (request_id,) = world.engine.held
    capture = world.gateway.close_episode(world.key)
    assert world.engine.cancelled == [request_id]
    assert (await refused(running)).status == 410
    assert (world.gateway.stats()["gateway/cancelled"], capture.calls["actor"]) == (1, [])
    world.engine.release(request_id, "late")  # the engine's answer comes after the end: nobody listens
    await asyncio.sleep(0.01)
    assert world.gateway.stats()["gateway/cancelled"] == 1


async def test_an_agent_that_goes_away_cancels_its_call(world: Any) -> None:
    running = asyncio.ensure_future(world.ask([USER]))
    await asyncio.sleep(0)
    (request_id,) = world.engine.held
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.engine.cancelled == [request_id]
    capture = world.gateway.close_episode(world.key)
    assert (world.gateway.stats()["gateway/cancelled"], capture.calls["actor"]) == (1, [])


async def test_a_generation_that_the_engine_cancelled_is_499(world: Any) -> None:
    world.engine.script.append(([1], "cancelled"))
    assert (await refused(world.ask([USER]))).status == 499
    assert world.close() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_parallel_calls_are_indexed_by_arrival_whichever_ends_first(world: Any, order: tuple[int, ...]) -> None:
    asks = [asyncio.ensure_future(world.ask([{"role": "user", "content": c}])) for c in "abc"]
    await asyncio.sleep(0)
    ids = list(world.engine.held)
    for n in order:
        world.engine.release(ids[n], f"re{n}")
        await asyncio.wait([asks[n]])
    texts = [world.chat.decode(call.generation.token_ids) for call in world.close()]
    assert texts == ["re0", "re1", "re2"]


async def test_answers_may_come_from_many_engine_threads(world: Any) -> None:
    asks = [asyncio.ensure_future(world.ask([{"role": "user", "content": str(n)}])) for n in range(200)]
    await asyncio.sleep(0)
    ids = list(world.engine.held)
    threads = [
        threading.Thread(target=lambda part=part: [world.engine.release(i, "x") for i in part])
        for part in (ids[::4], ids[1::4], ids[2::4], ids[3::4])
    ]
    for thread in threads:
        thread.start()
    replies = await asyncio.wait_for(asyncio.gather(*asks), 60)
    for thread in threads:
        thread.join()
    assert len(replies) == 200 and len(world.close()) == 200


async def test_policies_are_captured_apart(fakes: Any) -> None:
    chat = fakes.FakeChat()
    engines = {name: fakes.FakeEngine(chat) for name in ("actor", "verifier", "spare")}
    gateway = Gateway({name: PolicyEndpoint(engine, chat, NoParser()) for name, engine in engines.items()})
    key = gateway.open_episode(fakes.lease(sampling={"actor": Sampling(), "verifier": Sampling(temperature=0.5)}))
    engines["actor"].say("a")
    engines["verifier"].say("v")
    await gateway.chat(key, ChatRequest(model="actor", messages=[USER]))
    await gateway.chat(key, ChatRequest(model="verifier", messages=[USER]))
    assert (await refused(gateway.chat(key, ChatRequest(model="spare", messages=[USER])))).status == 404
    calls = gateway.close_episode(key).calls
    assert {name: [c.index for c in rows] for name, rows in calls.items()} == {"actor": [0], "verifier": [0]}
    assert engines["verifier"].requests[0][2].temperature == 0.5


async def test_json_in_json_out(world: Any) -> None:
    world.engine.say("a")
    body = json.dumps({"model": "actor", "messages": [USER], "user": "u", "parallel_tool_calls": True}).encode()
    status, reply = await world.gateway.answer(world.key, body)
    assert status == 200 and json.loads(reply)["choices"][0]["message"] == {"role": "assistant", "content": "a"}
    for wrong in (b"{", b"[]", b'{"model": "actor"}', b'{"model": "actor", "messages": [5]}', b"\xff"):
        status, reply = await world.gateway.answer(world.key, wrong)
        error = json.loads(reply)["error"]
        assert status == 400 and error["type"] == "invalid_request_error" and error["param"] == "body"
    status, reply = await world.gateway.answer("af-guess", body)
    assert status == 401 and json.loads(reply)["error"]["code"] == "invalid_api_key"


async def test_the_counters_add_up(world: Any) -> None:
    world.engine.say("ab", "c")
    reply = await world.ask([USER])
    message = {"role": "assistant", "content": reply.choices[0].message.content}
    await world.ask([USER, message, USER])
    stats = world.gateway.stats()
    prompts = [len(prompt) for _, prompt, _ in world.engine.requests]
    assert stats["gateway/calls"] == 2 and stats["gateway/open_episodes"] == 1
    assert stats["gateway/prompt_tokens"] == sum(prompts)
    assert stats["gateway/sampled_tokens"] == 5
    assert stats["gateway/encoded_tokens"] == sum(prompts) - prompts[0] - 3
    world.close()
    assert world.gateway.stats()["gateway/open_episodes"] == 0


async def test_a_refused_call_takes_no_index(world: Any) -> None:
    await refused(world.ask([USER], n=0))
    world.chat.render, render = _refuse, world.chat.render
    await refused(world.ask([USER]))
    world.chat.render = render
    world.engine.say("a")
    assert (await world.ask([USER])).id.endswith("/actor/0")


def _refuse(*_: Any, **__: Any) -> str:
    raise ModelError("chat_template", "m", "refuses these messages", "change them")
