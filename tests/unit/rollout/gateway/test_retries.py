"""A retry gets the answer of the call that it repeats; two equal requests are two samples otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astraflow.errors import EngineError, GatewayError
from astraflow.rollout.gateway.calls.events import Finished
from astraflow.rollout.gateway.calls.retries import KEPT_S, Retry, retry_of
from astraflow.rollout.gateway.dialect import ChatRequest

USER = {"role": "user", "content": "hi"}
FIRST, AGAIN = Retry(), Retry("", 1)


def request(text: str = "hi", **options: Any) -> ChatRequest:
    return ChatRequest(model="actor", messages=[{"role": "user", "content": text}], **options)


async def begin(world: Any, asked: ChatRequest, retry: Retry) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(world.gateway.chat(world.key, asked, retry))
    await asyncio.sleep(0)
    return task


async def test_headers_say_what_a_request_repeats() -> None:
    assert retry_of({}) == FIRST
    assert retry_of({"idempotency-key": "k", "x-stainless-retry-count": "2"}) == Retry("k", 2)
    for odd in ("", "-1", "x", "1.5", "²"):
        assert retry_of({"x-stainless-retry-count": odd}).count == 0


async def test_equal_requests_at_once_are_two_samples(world: Any) -> None:
    tasks = [await begin(world, request(), FIRST) for _ in range(2)]
    first, second = world.engine.held
    world.engine.release(first, "a")
    world.engine.release(second, "b")
    replies = await asyncio.gather(*tasks)
    assert {reply.choices[0].message.content for reply in replies} == {"a", "b"}
    assert len(world.close()) == 2 and world.gateway.stats()["gateway/retries"] == 0


@pytest.mark.parametrize("again", [AGAIN, Retry("k", 0), Retry("k", 1)])
async def test_a_retry_in_flight_joins_the_call_which_ends_with_its_last_reader(world: Any, again: Retry) -> None:
    first = await begin(world, request(), Retry(again.idempotency_key))
    second = await begin(world, request(), again)
    (request_id,) = world.engine.held
    first.cancel()  # the connection that was lost is noticed after the retry came
    await asyncio.wait({first})
    assert world.engine.cancelled == []
    world.engine.release(request_id, "a")
    assert (await second).choices[0].message.content == "a"
    assert len(world.close()) == 1 and world.gateway.stats()["gateway/retries"] == 1


async def test_the_last_reader_that_goes_cancels(world: Any) -> None:
    tasks = [await begin(world, request(), FIRST), await begin(world, request(), AGAIN)]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(world.engine.cancelled) == 1 and world.close() == []


@pytest.mark.parametrize("again", [AGAIN, Retry("k", 1)])
async def test_a_retry_of_an_answered_call_gets_the_answer(world: Any, again: Retry) -> None:
    world.engine.say("a", "b")
    one = await world.gateway.chat(world.key, request(), Retry(again.idempotency_key))
    two = await world.gateway.chat(world.key, request(), again)
    assert one == two
    other = await world.gateway.chat(world.key, request("other"), Retry("", 1))  # repeats nothing that is known
    assert other.choices[0].message.content == "b"
    assert len(world.close()) == 2


async def test_an_answer_is_kept_for_a_minute_but_for_idempotency_keys(world: Any) -> None:
    world.engine.say("a", "b", "c")
    one = await world.gateway.chat(world.key, request(), Retry("k"))
    (run,) = world.gateway._episodes[world.key].retries._begun
    run.ended_s -= KEPT_S + 1
    assert await world.gateway.chat(world.key, request(), Retry("k")) == one
    assert (await world.gateway.chat(world.key, request(), AGAIN)).choices[0].message.content == "b"


async def test_another_request_under_the_same_key_is_refused(world: Any) -> None:
    world.engine.say("a")
    await world.gateway.chat(world.key, request(), Retry("k"))
    for other in (request("other"), request(temperature=0.5)):
        with pytest.raises(GatewayError, match="idempotency-key=k") as caught:
            await world.gateway.chat(world.key, other, Retry("k"))
        assert (caught.value.status, caught.value.code) == (400, "idempotency_key_reused")
    with pytest.raises(GatewayError, match="idempotency-key=k"):
        await anext(world.gateway.stream(world.key, request(), Retry("k")))


async def test_keys_are_of_one_episode(world: Any, fakes: Any) -> None:
    world.engine.say("a", "b")
    other = world.gateway.open_episode(fakes.lease(episode_id="train/0/7/1"))
    replies = [await world.gateway.chat(key, request(), Retry("k")) for key in (world.key, other)]
    assert [reply.choices[0].message.content for reply in replies] == ["a", "b"]


@pytest.mark.parametrize("key", ["", "k"])
async def test_what_was_answered_by_an_error_is_tried_anew_also_beside_an_equal_sample(world: Any, key: str) -> None:
    world.engine.say("a")
    await world.gateway.chat(world.key, request(), FIRST)  # another sample of the same request
    world.engine.script.append(EngineError("engine", "down", "is closed", "restart"))
    with pytest.raises(GatewayError):
        await world.gateway.chat(world.key, request(), Retry(key))
    world.engine.say("b")
    again = await world.gateway.chat(world.key, request(), Retry(key, 1))
    assert again.choices[0].message.content == "b"
    later = await world.gateway.chat(world.key, request(), Retry(key, 2))  # whose answer was lost
    assert later == again and len(world.close()) == 2


async def test_an_error_that_was_tried_anew_hides_no_sample_that_still_runs(world: Any) -> None:
    asked = await begin(world, request(), FIRST)
    (running,) = world.engine.held
    world.engine.script.append(EngineError("engine", "down", "is closed", "restart"))
    with pytest.raises(GatewayError):
        await world.gateway.chat(world.key, request(), FIRST)
    world.engine.say("b")
    await world.gateway.chat(world.key, request(), AGAIN)  # for the error
    world.gateway._episodes[world.key].retries._begun[-1].ended_s -= KEPT_S + 1
    joined = await begin(world, request(), AGAIN)  # for the one whose answer is not there yet
    assert list(world.engine.held) == [running]
    world.engine.release(running, "a")
    assert await asked == await joined and len(world.close()) == 2


async def test_a_retry_of_a_stream_reads_it_from_its_start(world: Any) -> None:
    world.engine.say("abc")
    streams = [world.gateway.stream(world.key, request(stream=True), retry) for retry in (FIRST, AGAIN)]
    events = [[event async for event in stream] for stream in streams]
    assert events[0] == events[1] and isinstance(events[0][-1], Finished)
    assert len(world.close()) == 1
