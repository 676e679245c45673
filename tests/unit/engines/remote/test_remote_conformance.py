"""Of the promises of an engine, those that ask for no weights, no tokens and no logprobs."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from astraflow.errors import EngineError
from astraflow.testing.engines.suite import EngineCase, EngineSuite, check_generation
from astraflow.types import Generation, Sampling
from fake_service import FakeService


class TestRemote:
    test_cancel_of_an_unknown = EngineSuite.test_cancel_of_an_unknown_or_finished_request_is_nothing
    test_a_request_id_in_use_is_refused = EngineSuite.test_a_request_id_in_use_is_refused
    test_sampling_out_of_range_is_refused = EngineSuite.test_sampling_out_of_range_is_refused
    test_what_is_no_prompt_is_refused = EngineSuite.test_what_is_no_prompt_is_refused
    test_an_overload_can_be_closed = EngineSuite.test_an_overload_can_be_closed
    test_close_fails_what_is_pending_and_what_comes_after = (
        EngineSuite.test_close_fails_what_is_pending_and_what_comes_after
    )

    @pytest.fixture
    def case(self, start: Callable[..., Any], service: FakeService) -> EngineCase:
        """A service that hangs until it is told to answer. A reply has one character."""
        service.reply = lambda body: {"hang": True}
        asker = start(max_context=2000)
        prompt = asker.chat.encode(
            asker.chat.render([{"role": "user", "content": "?"}], None, add_generation_prompt=True)
        )

        def finish() -> None:
            service.reply = lambda body: {"content": "!", "finish": "length"}

        return EngineCase(
            engine=asker.engine, prompt=prompt.tolist(), long_tokens=300, tensors={}, advance=lambda: None,
            finish=finish, num_overload=100,
        )  # fmt: skip


def test_a_thousand_requests_and_cancels_at_a_service_that_fails_at_random(
    start: Callable[..., Any], service: FakeService
) -> None:
    """Whoever waits gets the answer to the own question, or why there is none."""
    draw, faults = random.Random(3), random.Random(4)

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        question = body["messages"][0]["content"]
        if int(question) % 10 == 0:
            return {"status": 400, "body": b"no"}
        again = {"status": 429, "body": b"", "headers": {"Retry-After": "0"}}
        broken = {"status": 500, "body": b"oops"}
        kind = faults.choices(["well", "busy", "broken", "cut"], [12, 1, 1, 1])[0]
        said = {"content": f"to {question}"}
        return {"well": said, "busy": again, "broken": broken, "cut": {**said, "cut": b"{"}}[kind]

    service.reply = reply
    asker = start(retries=50, concurrency=8)
    asked: list[tuple[int, Future[Generation]]] = []
    cancelled: set[int] = set()
    for _ in range(1000):
        if draw.random() < 0.7:
            question = draw.randrange(400)  # many are asked twice, at temperature 0 or above it
            sampling = Sampling(temperature=float(draw.choice([0, 1])))
            asked.append((question, asker.begin(str(question), sampling, episode=f"e{len(asked)}/1")))
        elif asked:
            number = draw.randrange(max(0, len(asked) - 12), len(asked))
            cancelled.add(number)
            asker.engine.cancel(f"e{number}/1/judge/{number + 1}")
    ends = set()
    for number, (question, future) in enumerate(asked):
        error = future.exception(60)
        if error is not None:
            assert isinstance(error, EngineError) and question % 10 == 0
            continue
        generation = future.result(0)
        check_generation(generation)
        ends.add(generation.finish_reason)
        if generation.finish_reason == "cancelled":
            assert number in cancelled and not len(generation.token_ids)
        else:
            assert asker.chat.decode(generation.token_ids) == f"to {question}"
    assert ends == {"stop", "cancelled"}
    stats = asker.engine.stats()
    assert (stats["running"], stats["waiting"], stats["requests"]) == (0, 0, len(asked))
    assert stats["remote_retries"] and stats["remote_known"]
