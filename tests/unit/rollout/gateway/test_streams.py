"""Replies that stream while they are sampled: pieces, stops, tool calls, logprobs, hang-ups, failures, capture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import EngineError, GatewayError
from astraflow.rollout.gateway.calls.events import ChoiceEnded, Event, Finished, Reasoning, Started, Text, ToolDelta
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import ChatRequest
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import HermesParser
from astraflow.types import Sampling

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


class Reader:
    """Reads a stream in the background, as a client does."""

    def __init__(self, stream: AsyncGenerator[Event, None]) -> None:
        self.events: list[Event] = []
        self.task = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: AsyncGenerator[Event, None]) -> None:
        try:
            async for event in stream:
                self.events.append(event)
        finally:
            await stream.aclose()

    def text(self, choice: int = 0) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Text) and e.choice == choice)

    def calls(self) -> list[tuple[str, str, str]]:
        return [(e.id, e.name, e.arguments) for e in self.events if isinstance(e, ToolDelta)]

    async def hang_up(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


async def test_tokens_are_given_on_as_they_are_sampled(stage: Any) -> None:
    made = stage("abc")
    reader = Reader(made.stream())
    await made.turn()
    assert isinstance(reader.events[0], Started) and reader.events[0].prompt_tokens == len(made.engine.seen[0][1])
    for expected in ("a", "ab", "abc"):
        assert reader.text() == expected[:-1]
        made.engine.step()
        await made.turn()
        assert reader.text() == expected
    made.engine.step()
    await reader.task
    *_, ended, finished = reader.events
    assert isinstance(ended, ChoiceEnded) and (ended.finish_reason, ended.stop) == ("stop", None)
    assert isinstance(finished, Finished) and finished.completion.choices[0].message.content == "abc"
    assert finished.completion.usage.completion_tokens == 4
    (call,) = made.close()
    assert call.generation.token_ids.tolist() == [*made.chat.encode("abc"), made.chat.eos_ids[0]]


async def test_what_may_be_the_start_of_a_stop_string_is_held_back(stage: Any) -> None:
    made = stage("aENbENDc")
    reader = Reader(made.stream(stop=["END"]))
    await made.turn()
    seen = []
    for _ in range(7):
        made.engine.step()
        await made.turn()
        seen.append(reader.text())
    assert seen == ["a", "a", "a", "aENb", "aENb", "aENb", "aENb"]
    await reader.task
    ended = reader.events[-2]
    assert isinstance(ended, ChoiceEnded) and (ended.finish_reason, ended.stop) == ("stop", "END")
    assert made.engine.stats()["running"] == 0  # it was stopped there
    (call,) = made.close()
    assert made.chat.decode(call.generation.token_ids) == "aENbEND"
    assert call.generation.finish_reason == "stop" and made.stat("dropped_tokens") == 0


async def test_a_stop_string_stops_the_engine_of_a_request_that_does_not_stream_too(stage: Any) -> None:
    made = stage("aENDbcdef")
    asked = asyncio.ensure_future(made.gateway.chat(made.key, made.request(stop="END")))
    await made.turn()
    made.engine.step(6)
    reply = await asked
    assert (reply.choices[0].message.content, reply.choices[0].stop_sequence) == ("a", "END")
    await made.turn()
    assert made.engine.stats()["running"] == 0
    assert made.stat("dropped_tokens") == 2 == made.engine.stats()["sampled_tokens"] - made.stat("sampled_tokens")


async def test_a_tool_call_is_held_back_until_it_is_whole(stage: Any, fakes: Any) -> None:
    made = stage(f"so {CALL}{CALL} <tool_call>no")
    reader = Reader(made.stream(tools=[fakes.tool("f", x="integer")]))
    await made.turn()
    while not reader.calls():
        assert reader.text() in ("", "s", "so")
        made.engine.step()
        await made.turn()
    assert made.engine.stats()["running"] == 1  # the first call is told while the second is sampled
    made.engine.release()
    await reader.task
    assert reader.calls() == [("call_0_0", "f", '{"x":1}'), ("call_0_1", "f", '{"x":1}')]
    assert reader.text() == "so\n<tool_call>no" and made.stat("malformed_tool_calls") == 1
    assert reader.events[-2].finish_reason == "tool_calls"  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [True, False])
async def test_only_one_call_where_parallel_ones_are_not_wanted(stage: Any, fakes: Any, stream: bool) -> None:
    made = stage(f"{CALL}{CALL} and more")
    made.engine.release()
    request = {"tools": [fakes.tool("f", x="integer")], "parallel_tool_calls": False}
    if stream:
        reader = Reader(made.stream(**request))
        await reader.task
        completion = reader.events[-1].completion  # type: ignore[union-attr]
        assert reader.calls() == [("call_0_0", "f", '{"x":1}')] and reader.text() == ""
    else:
        completion = await made.gateway.chat(made.key, made.request(**request))
    assert [call.id for call in completion.choices[0].message.tool_calls] == ["call_0_0"]
    (call,) = made.close()
    assert made.chat.decode(call.generation.token_ids) == CALL and call.generation.finish_reason == "stop"


async def test_the_end_of_the_only_call_ends_the_reply_whatever_else_its_token_says(stage: Any, fakes: Any) -> None:
    class Coarse(fakes.FakeChat):  # one token is the end of a call and the start of another
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return str(super().decode(ids, skip_special_tokens)).replace("#", "</tool_call> <tool_")

    chat = Coarse()
    text = CALL.replace("</tool_call>", "#")
    engine = ScriptedEngine([[*chat.encode(text + "call>"), fakes.EOS]])
    gateway = Gateway({"actor": PolicyEndpoint(engine, chat, HermesParser())})
    key = gateway.open_episode(fakes.lease(sampling={"actor": Sampling(max_tokens=400)}))
    request = ChatRequest(
        model="actor", messages=[USER], tools=[fakes.tool("f", x="integer")], parallel_tool_calls=False
    )
    reader = Reader(gateway.stream(key, request))
    await reader.task
    assert (reader.text(), reader.calls()) == ("", [("call_0_0", "f", '{"x":1}')])
    (call,) = gateway.close_episode(key).calls["actor"]
    assert call.generation.token_ids.tolist() == chat.encode(text)


async def test_a_stop_id_of_the_run_is_sampled_and_says_nothing(fakes: Any) -> None:
    chat = fakes.FakeChat()
    engine = ScriptedEngine([chat.encode("abx")])
    gateway = Gateway({"actor": PolicyEndpoint(engine, chat, HermesParser())})
    sampling = Sampling(stop_token_ids=(fakes.IDS["x"],))
    key = gateway.open_episode(fakes.lease(sampling={"actor": sampling}))
    reader = Reader(gateway.stream(key, ChatRequest(model="actor", messages=[USER])))
    await reader.task
    assert reader.text() == "ab"
    assert reader.events[-1].completion.choices[0].message.content == "ab"  # type: ignore[union-attr]
    (call,) = gateway.close_episode(key).calls["actor"]
    assert chat.decode(call.generation.token_ids) == "abx"


async def test_half_a_character_is_never_given(fakes: Any) -> None:
    class Bytes(fakes.FakeChat):  # ids are bytes
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return bytes(int(i) for i in ids if i < 256).decode(errors="replace")

    chat = Bytes()
    chat.eos_ids = (300,)
    text = "a€𝄞e\u0301"
    engine = ScriptedEngine([[*text.encode(), 0xE2, 0x82, 300]], held=True)
    gateway = Gateway({"actor": PolicyEndpoint(engine, chat, HermesParser())})
    key = gateway.open_episode(fakes.lease())
    reader = Reader(gateway.stream(key, ChatRequest(model="actor", messages=[USER], logprobs=True)))
    await asyncio.sleep(0)
    for _ in range(len(text.encode()) + 2):
        engine.step()
        await asyncio.sleep(0.001)
        assert "�" not in reader.text()
    assert reader.text() == text
    engine.release()
    await reader.task
    assert reader.text() == text + "�"  # bytes that never became a character
    rows = [row for e in reader.events if not isinstance(e, Started | Finished) for row in e.logprobs]
    assert len(rows) == len(text.encode()) + 3 and [row.bytes for row in rows[:2]] == [[97], None]


async def test_n_choices_are_calls_of_their_own(stage: Any) -> None:
    made = stage("abc", "de", "f")
    reader = Reader(made.stream(n=3, seed=5))
    await made.turn()
    assert reader.events[0].num_choices == 3 and len(reader.events) == 1  # type: ignore[union-attr]
    made.engine.step(2)
    await made.turn()
    assert [reader.text(choice) for choice in range(3)] == ["ab", "de", "f"]
    made.engine.release()
    await reader.task
    completion = reader.events[-1].completion  # type: ignore[union-attr]
    assert [(c.index, c.message.content) for c in completion.choices] == [(0, "abc"), (1, "de"), (2, "f")]
    assert completion.usage.completion_tokens == 4 + 3 + 2
    assert completion.usage.prompt_tokens == len(made.engine.seen[0][1])
    assert len({request_id for request_id, _, _ in made.engine.seen}) == 3
    assert len({sampling.seed for _, _, sampling in made.engine.seen}) == 3
    calls = made.close()
    assert [call.index for call in calls] == [0, 1, 2]
    assert [made.chat.decode(call.generation.token_ids) for call in calls] == ["abc", "de", "f"]


async def test_a_choice_that_fails_fails_them_all(stage: Any) -> None:
    made = stage("abc", "de")
    asked = asyncio.ensure_future(made.gateway.chat(made.key, made.request(n=2)))
    await made.turn()
    first = made.engine.seen[0][0]
    made.engine.step(9, first)
    await made.turn()
    made.engine.cancel(made.engine.seen[1][0])
    with pytest.raises(GatewayError):
        await asked
    assert made.close() == [] and made.stat("dropped_tokens") == made.engine.stats()["sampled_tokens"] == 4


async def test_an_agent_that_hangs_up_in_the_middle_has_what_it_got_captured(stage: Any) -> None:
    made = stage("abcdef", "next")
    reader = Reader(made.stream())
    await made.turn()
    made.engine.step(3)
    await made.turn()
    assert reader.text() == "abc"
    await reader.hang_up()
    assert made.engine.stats()["running"] == 0
    assert (made.stat("streams_cut"), made.stat("cancelled")) == (1, 1)
    asked = asyncio.ensure_future(
        made.gateway.chat(made.key, made.request(messages=[USER, {"role": "assistant", "content": "abc"}, USER]))
    )
    await made.turn()
    made.engine.release()
    await asked
    first, second = made.close()
    assert (made.chat.decode(first.generation.token_ids), first.generation.finish_reason) == ("abc", "cancelled")
    own = [*first.prompt_ids.tolist(), *first.generation.token_ids.tolist()]
    assert second.prompt_ids.tolist()[: len(own)] == own and not second.forked


async def test_a_choice_that_has_said_nothing_when_an_agent_hangs_up_is_no_call(stage: Any) -> None:
    made = stage("abc", "de")
    reader = Reader(made.stream(n=2))
    await made.turn()
    made.engine.step(2, made.engine.seen[0][0])
    await made.turn()
    await reader.hang_up()
    (call,) = made.close()
    assert made.chat.decode(call.generation.token_ids) == "ab" and made.engine.stats()["running"] == 0


async def test_what_was_held_back_when_an_agent_hung_up_is_not_put_into_its_mouth(stage: Any) -> None:
    made = stage("abENx", "next")
    reader = Reader(made.stream(stop="END"))
    await made.turn()
    made.engine.step(4)
    await made.turn()
    assert reader.text() == "ab"
    await reader.hang_up()
    made.engine.release()
    history = [USER, {"role": "assistant", "content": "ab"}, USER]
    await made.gateway.chat(made.key, made.request(messages=history))
    first, second = made.close()
    assert made.chat.decode(first.generation.token_ids) == "abEN"
    written = made.chat.render(history, None, add_generation_prompt=True)
    assert made.chat.decode(second.prompt_ids, skip_special_tokens=False) == written


async def test_closing_the_episode_captures_what_a_stream_has_given_and_ends_it(stage: Any) -> None:
    made = stage("abcdef")
    reader = Reader(made.stream())
    await made.turn()
    made.engine.step(2)
    await made.turn()
    (call,) = made.close()
    assert made.chat.decode(call.generation.token_ids) == "ab"
    await asyncio.wait({reader.task})
    error = reader.task.exception()
    assert isinstance(error, GatewayError) and error.status == 410
    assert made.engine.stats()["running"] == 0


async def test_a_stream_of_which_nothing_was_given_leaves_no_call(stage: Any) -> None:
    made = stage("<tool_call>x")
    reader = Reader(made.stream(stop="<tool_call>xy"))
    await made.turn()
    made.engine.step(2)
    await made.turn()
    await reader.hang_up()
    await made.turn()
    assert made.close() == [] and made.stat("dropped_tokens") == made.engine.stats()["sampled_tokens"] == 2


async def test_an_engine_that_fails_ends_the_stream_by_an_error(stage: Any) -> None:
    made = stage("abc")
    reader = Reader(made.stream())
    await made.turn()
    made.engine.step()
    await made.turn()
    made.engine.fail(EngineError("engine", "broken", "is gone", "start it again"))
    await asyncio.wait({reader.task})
    error = reader.task.exception()
    assert isinstance(error, GatewayError) and error.status == 503 and reader.text() == "a"
    with pytest.raises(GatewayError, match="is gone"):  # before the first event, so it becomes a status
        await anext(made.stream())
    assert made.close() == []


async def test_logprobs_come_with_the_pieces_of_their_tokens(stage: Any) -> None:
    made = stage("aENDb")
    made.engine.release()
    reader = Reader(made.stream(logprobs=True, stop="NDx"))
    await reader.task
    pieces = [(e.text, [row.token for row in e.logprobs]) for e in reader.events if isinstance(e, Text)]
    assert pieces == [("a", ["a"]), ("E", ["E"]), ("NDb", ["N", "D", "b"])]
    choice = reader.events[-1].completion.choices[0]  # type: ignore[union-attr]
    assert [row.token for row in choice.logprobs.content] == ["a", "E", "N", "D", "b", ""]
    assert reader.events[-2].logprobs == choice.logprobs.content[-1:]  # type: ignore[union-attr]


TEXTS = ["a", "EN", "END", "D", "<tool_call>", "</tool_call>", CALL, " ", "\n", '{"', "hello"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.sampled_from(TEXTS), max_size=6), stops=st.sampled_from([(), ("END",), ("D ", "lo")]),
    tools=st.booleans(), parallel=st.booleans(), steps=st.lists(st.integers(1, 30), max_size=12),
)  # fmt: skip
def test_a_stream_says_and_captures_what_a_request_without_one_does(
    stage: Any, fakes: Any, words: list[str], stops: tuple[str, ...], tools: bool, parallel: bool, steps: list[int]
) -> None:
    options: dict[str, Any] = {"stop": list(stops), "parallel_tool_calls": parallel}
    options |= {"tools": [fakes.tool("f", x="integer")]} if tools else {}

    async def play() -> None:
        text = "".join(words)
        whole, pieced = (stage(text, max_tokens=80) for _ in range(2))
        whole.engine.release()
        expected = await whole.gateway.chat(whole.key, whole.request(**options))
        reader = Reader(pieced.stream(**options))
        await pieced.turn()
        for step in steps:
            pieced.engine.step(step)
            await pieced.turn()
        pieced.engine.release()
        await reader.task
        completion = reader.events[-1].completion  # type: ignore[union-attr]
        assert completion.choices == expected.choices and completion.usage == expected.usage
        message = completion.choices[0].message
        assert reader.text() == (message.content or "")
        assert reader.calls() == [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        assert not any(isinstance(event, Reasoning) for event in reader.events)
        (one,), (other,) = whole.close(), pieced.close()
        for field in ("token_ids", "logprobs", "versions"):
            assert getattr(one.generation, field).tolist() == getattr(other.generation, field).tolist()
        assert one.generation.finish_reason == other.generation.finish_reason

    asyncio.run(play())


async def test_what_was_in_force_is_kept_with_the_call(fakes: Any) -> None:
    chat = fakes.FakeChat()
    engine = ScriptedEngine([[fakes.EOS]])
    endpoint = PolicyEndpoint(engine, chat, HermesParser(), agents_choose=["temperature", "top_k"])
    gateway = Gateway({"actor": endpoint})
    base = Sampling(temperature=0.8, top_p=0.9, max_tokens=64)
    key = gateway.open_episode(fakes.lease(sampling={"actor": base}))
    for options in ({}, {"temperature": 0.0, "top_k": -1}, {"temperature": 1.5, "top_k": 7, "top_p": 0.1}):
        await gateway.chat(key, ChatRequest(model="actor", messages=[USER], **options))  # type: ignore[arg-type]
    seen = [call.sampling for call in gateway.close_episode(key).calls["actor"]]
    assert seen == [sampling for _, _, sampling in engine.seen]
    assert seen[0] == base
    told = [(s.temperature, s.top_k, s.top_p, s.logprob_temperature) for s in seen[1:]]
    assert told == [(0.0, 0, 0.9, 0.8), (1.5, 7, 0.9, 0.8)]
    assert gateway.stats()["gateway/sampling_overridden"] == 1  # top_p
