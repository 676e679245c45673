"""Token-exact prompts: what is stored is reused, only what is new is tokenised."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from astraflow.errors import GatewayError, ModelError

USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}


def back(reply: Any) -> dict[str, Any]:
    """The reply as a dict, as an agent sends it back."""
    return msgspec.to_builtins(reply.choices[0].message)


def full(world: Any, number: int) -> list[int]:
    """Prompt and reply of a call, from the capture's point of view."""
    call = world.gateway._episodes[world.key].captures["actor"].calls[number]
    return [*call.prompt_ids.tolist(), *call.generation.token_ids.tolist()]


async def test_the_first_prompt_is_the_rendered_template(world: Any) -> None:
    world.engine.say("yes")
    await world.ask([USER])
    assert world.prompt_text() == "<s><|user|>hi</s>\n<|assistant|>"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_two_equal_replies_the_later_call_is_continued(world: Any, fakes: Any, order: tuple[int, int]) -> None:
    asks = [asyncio.ensure_future(world.ask([USER])) for _ in range(2)]
    while len(world.engine.held) < 2:
        await asyncio.sleep(0)
    futures = list(world.engine.held.values())
    written = [["hello", "</s>"], ["he", "llo", "</s>"]]
    for number in order:  # in which they end
        futures[number].set_result(fakes.generation([fakes.IDS[word] for word in written[number]], "stop"))
        await asks[number]
    world.engine.say("x")
    await world.ask([USER, {"role": "assistant", "content": "hello"}, MORE])
    _, later, third = world.close()
    own = [*later.prompt_ids.tolist(), *later.generation.token_ids.tolist()]
    assert third.prompt_ids[: len(own)].tolist() == own


async def test_a_follow_up_reuses_ids_and_encodes_only_what_is_new(world: Any) -> None:
    world.engine.say("yes", "no")
    reply = await world.ask([USER])
    before = full(world, 0)
    world.chat.encoded.clear()
    await world.ask([USER, back(reply), MORE])
    assert world.chat.encoded == ["\n<|user|>more</s>\n<|assistant|>"]
    assert world.engine.requests[1][1][: len(before)] == before
    assert world.prompt_text() == "<s><|user|>hi</s>\n<|assistant|>yes</s>\n<|user|>more</s>\n<|assistant|>"
    assert not any(call.forked for call in world.close())


async def test_emitted_ids_are_kept_where_the_tokenizer_would_choose_others(world: Any, fakes: Any) -> None:
    world.engine.say_pieces("he", "llo")
    world.engine.say("x")
    reply = await world.ask([USER])
    assert reply.choices[0].message.content == "hello"
    await world.ask([USER, back(reply), MORE])
    prompt = world.engine.requests[1][1]
    assert fakes.IDS["he"] in prompt and fakes.IDS["llo"] in prompt
    assert fakes.IDS["hello"] not in prompt
    first, second = world.close()
    assert first.generation.token_ids.tolist() == [fakes.IDS["he"], fakes.IDS["llo"], fakes.EOS]
    assert second.prompt_ids.tolist() == prompt


async def test_a_reply_cut_by_length_gains_no_sampled_eos(world: Any, fakes: Any) -> None:
    world.engine.cut("unfini")
    world.engine.say("x")
    reply = await world.ask([USER])
    assert reply.choices[0].finish_reason == "length"
    await world.ask([USER, back(reply), MORE])
    assert world.prompt_text() == "<s><|user|>hi</s>\n<|assistant|>unfini</s>\n<|user|>more</s>\n<|assistant|>"
    first, second = world.close()
    assert fakes.EOS not in first.generation.token_ids.tolist()
    assert not second.forked


async def test_the_longest_of_several_contexts_is_reused(world: Any) -> None:
    world.engine.say("a", "b", "c")
    one = await world.ask([USER])
    two = await world.ask([USER, back(one), MORE])
    world.chat.encoded.clear()
    await world.ask([USER, back(one), MORE, back(two), USER])
    assert world.chat.encoded == ["\n<|user|>hi</s>\n<|assistant|>"]


async def test_content_is_compared(world: Any) -> None:
    world.engine.say("a", "b")
    await world.ask([USER])
    world.chat.encoded.clear()
    await world.ask([USER, {"role": "assistant", "content": "rewritten"}, MORE])
    assert world.chat.encoded == [world.prompt_text()]
    assert not world.close()[1].forked  # nothing of ours was continued: a new history, not a fork by the template


async def test_two_empty_replies_with_different_tool_calls_are_different(world: Any, fakes: Any) -> None:
    tools = [fakes.tool("f", x="integer")]
    for x in (1, 2):
        world.engine.say(f'<tool_call>{{"name": "f", "arguments": {{"x": {x}}}}}</tool_call>')
    world.engine.say("end")
    one = await world.ask([USER], tools=tools)
    two = await world.ask([USER], tools=tools)
    calls = [r.choices[0].message.tool_calls[0] for r in (one, two)]
    assert [c.function.arguments for c in calls] == ['{"x":1}', '{"x":2}'] and calls[0].id != calls[1].id
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "ok"}
    await world.ask([USER, back(one), result], tools=tools)
    prompt = world.engine.requests[2][1]
    assert prompt[: len(full(world, 0))] == full(world, 0)
    assert prompt[: len(full(world, 1))] != full(world, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {**m, "content": ""},
        lambda m: {**m, "content": None, "refusal": None, "function_call": None, "audio": None},
        lambda m: {k: v for k, v in m.items() if k != "content"},
        lambda m: _with_arguments(m, '{ "y" : "z",  "x" : 1 }'),
        lambda m: _with_arguments(m, '{"x": 1.0, "y": "\\u007a"}'),
        lambda m: _with_arguments(m, {"x": 1, "y": "z"}),
    ],
)
async def test_a_reply_sent_back_in_another_form_is_the_same_message(world: Any, fakes: Any, change: Any) -> None:
    tools = [fakes.tool("f", x="integer", y="string")]
    world.engine.say('<tool_call>{"name": "f", "arguments": {"x": 1, "y": "z"}}</tool_call>', "end")
    reply = await world.ask([USER], tools=tools)
    message = change(back(reply))
    await world.ask([USER, message, {"role": "tool", "tool_call_id": "call_0_0", "content": "ok"}], tools=tools)
    assert world.engine.requests[1][1][: len(full(world, 0))] == full(world, 0)
    assert not world.close()[1].forked


def _with_arguments(message: dict[str, Any], arguments: Any) -> dict[str, Any]:
    call = message["tool_calls"][0]
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: _with_arguments(m, '{"x": 2}'),
        lambda m: {**m, "tool_calls": [{**m["tool_calls"][0], "id": "call_9_9"}]},
        lambda m: {**m, "tool_calls": []},
        lambda m: {**m, "content": "other"},
    ],
)
async def test_a_changed_reply_is_another_message(world: Any, fakes: Any, change: Any) -> None:
    tools = [fakes.tool("f", x="integer")]
    world.engine.say('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "end")
    message = change(back(await world.ask([USER], tools=tools)))
    world.chat.encoded.clear()
    await world.ask([USER, message, MORE], tools=tools)
    assert world.chat.encoded == [world.prompt_text()]


async def test_emitted_tool_json_is_kept_when_the_template_writes_it_with_other_spaces(world: Any, fakes: Any) -> None:
    tools = [fakes.tool("f", x="integer")]
    world.engine.say('<tool_call>{"name":"f",   "arguments":{"x":1}}</tool_call>', "end")
    reply = await world.ask([USER], tools=tools)
    world.chat.encoded.clear()
    await world.ask([USER, back(reply), MORE], tools=tools)
    assert world.chat.encoded == ["\n<|user|>more</s>\n<|assistant|>"]
    assert '"name":"f",   "arguments"' in world.prompt_text()
    assert not world.close()[1].forked


async def test_a_cut_reply_that_the_template_trims_keeps_its_ids_and_is_closed_by_given_text(make_world: Any) -> None:
    world = make_world("trimmed")
    world.engine.cut("cut  ")
    world.engine.say("end")
    reply = await world.ask([USER])
    await world.ask([USER, back(reply), MORE])
    assert world.prompt_text() == "<s><|user|>hi</s>\n<|assistant|>cut  </s>\n<|user|>more</s>\n<|assistant|>"
    assert not world.close()[1].forked


async def test_removed_thinking_forks_and_is_counted(make_world: Any) -> None:
    world = make_world("thinking")
    world.engine.say("<think>hm</think>yes", "no", "end")
    reply = await world.ask([USER])
    next_reply = await world.ask([USER, back(reply), MORE])
    assert world.prompt_text() == "<s><|user|>hi</s>\n<|assistant|>yes</s>\n<|user|>more</s>\n<|assistant|>"
    world.chat.encoded.clear()
    await world.ask([USER, back(reply), MORE, back(next_reply), MORE])
    assert world.chat.encoded == ["\n<|user|>more</s>\n<|assistant|>"]  # the fork itself goes on append-only
    first, second, third = world.close()
    assert [c.forked for c in (first, second, third)] == [False, True, False]
    assert world.gateway.stats()["gateway/forks"] == 1
    assert "<think>hm</think>yes" in world.chat.decode(first.generation.token_ids)


async def test_thinking_kept_within_a_turn_does_not_fork(make_world: Any) -> None:
    world = make_world("thinking")
    world.engine.say("<think>hm</think>yes", "no")
    reply = await world.ask([USER])
    await world.ask([USER, back(reply), {"role": "tool", "content": "5"}])
    assert not world.close()[1].forked


async def test_tool_messages_folded_among_what_is_new_do_not_fork(make_world: Any) -> None:
    world = make_world("folded")
    world.engine.say("a", "b")
    tool = {"role": "tool", "content": "5"}
    reply = await world.ask([USER])
    await world.ask([USER, back(reply), tool, tool])
    assert "<|tool|>5|5</s>" in world.prompt_text()
    assert not world.close()[1].forked


async def test_a_template_that_rewrites_the_head_forks_every_turn(make_world: Any) -> None:
    world = make_world("counted")
    world.engine.say("a", "b", "c")
    one = await world.ask([USER])
    two = await world.ask([USER, back(one), MORE])
    await world.ask([USER, back(one), MORE, back(two), MORE])
    assert world.prompt_text().startswith("<s>5<|user|>hi</s>")
    assert [call.forked for call in world.close()] == [False, True, True]


async def test_a_shallower_context_serves_when_the_deepest_is_not_continued(make_world: Any) -> None:
    world = make_world("thinking")
    world.engine.say("plain", "<think>hm</think>yes", "end")
    one = await world.ask([USER])
    two = await world.ask([USER, back(one), MORE])
    world.chat.encoded.clear()
    await world.ask([USER, back(one), MORE, back(two), MORE])
    expected = "\n<|user|>more</s>\n<|assistant|>yes</s>\n<|user|>more</s>\n<|assistant|>"
    assert world.chat.encoded == [expected]
    assert world.close()[2].forked


async def test_of_two_equal_replies_the_later_call_is_continued_whichever_ended_first(
    make_world: Any, fakes: Any
) -> None:
    prompts = []
    for order in ((0, 1), (1, 0)):
        world = make_world()
        asks = [asyncio.ensure_future(world.ask([USER])) for _ in range(2)]
        await asyncio.sleep(0)
        ids = list(world.engine.held)
        for n in order:
            future = world.engine.held.pop(ids[n])
            pieces = [[fakes.IDS["he"], fakes.IDS["llo"]], [fakes.IDS["hello"]]][n]
            future.set_result(fakes.generation([*pieces, fakes.EOS], "stop"))
            await asyncio.wait([asks[n]])
        reply = asks[0].result()
        world.engine.say("x")
        await world.ask([USER, back(reply), MORE])
        prompts.append(world.engine.requests[-1][1])
        assert [c.generation.token_ids.tolist() for c in world.close()[:2]] == [[7, 8, 1], [6, 1]]
    assert prompts[0] == prompts[1]


async def test_changed_tools_are_a_different_prompt(world: Any, fakes: Any) -> None:
    world.engine.say("a", "b", "c")
    await world.ask([USER], tools=[fakes.tool("f")])
    await world.ask([USER], tools=[fakes.tool("g")])
    await world.ask([USER])
    assert json.dumps([fakes.tool("g")]) in world.prompt_text(1)
    assert world.prompt_text(2) == "<s><|user|>hi</s>\n<|assistant|>"


async def test_siblings_share_the_tokenised_first_prompt(world: Any, fakes: Any) -> None:
    world.engine.say("a", "b")
    await world.ask([USER])
    world.chat.encoded.clear()
    world.key = world.gateway.open_episode(fakes.lease(episode_id="train/0/7/1"))
    await world.ask([USER])
    assert world.chat.encoded == []
    assert world.engine.requests[0][1] == world.engine.requests[1][1]


@pytest.mark.parametrize(
    ("messages", "thing"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "tool", "content": "", "tool_call_id": 5}], "messages[0]"),
    ],
)
async def test_a_malformed_message_is_named(world: Any, messages: Any, thing: str) -> None:
    with pytest.raises(GatewayError) as caught:
        await world.ask(messages)
    assert (caught.value.thing, caught.value.status) == (thing, 400)
    assert world.engine.requests == []


async def test_text_parts_and_the_developer_role_are_read(world: Any) -> None:
    world.engine.say("a")
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    await world.ask([{"role": "developer", "content": "be"}, {"role": "user", "content": parts}])
    assert world.prompt_text() == "<s><|system|>be</s>\n<|user|>hi</s>\n<|assistant|>"


async def test_messages_that_the_template_refuses_are_a_bad_request(world: Any) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise ModelError("chat_template", "m", "refuses these messages", "change them")

    world.chat.render = refuse
    with pytest.raises(GatewayError, match="refuses these messages") as caught:
        await world.ask([USER])
    assert caught.value.status == 400
