"""Of the promises of an engine, those that ask for no weights, no tokens and no logprobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from astraflow.testing.engines.suite import EngineCase, EngineSuite
from fake_service import FakeService


class TestRemote:
    test_cancel_of_an_unknown = EngineSuite.test_cancel_of_an_unknown_or_finished_request_is_nothing
    test_a_request_id_in_use_is_refused = EngineSuite.test_a_request_id_in_use_is_refused
    test_sampling_out_of_range_is_refused = EngineSuite.test_sampling_out_of_range_is_refused
    test_an_empty_prompt_is_refused = EngineSuite.test_an_empty_prompt_is_refused
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
