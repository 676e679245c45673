"""Waiting for a service that is away."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from astraflow.errors import Unreachable, WireError
from astraflow.wire import patience
from astraflow.wire.patience import Patience, Stopped, ask_patiently

AWAY, FULL = Unreachable("url=x gave no answer", 503), WireError("journal=x cannot be written", 507)


class Service:
    """Answers 7 after `failures`, one each time."""

    def __init__(self, *failures: WireError) -> None:
        self.failures = list(failures)

    def __call__(self) -> int:
        if self.failures:
            raise self.failures.pop(0)
        return 7


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_PAUSE_S", 0.001)


def test_a_service_that_is_away_or_full_is_asked_again_and_the_log_says_so_once(caplog: Any) -> None:
    assert ask_patiently(Service(AWAY, FULL, AWAY), threading.Event(), 60) == 7
    (record,) = caplog.records
    assert record.getMessage() == "waits for the dataflow service, up to 60 s more: url=x gave no answer"


def test_a_long_wait_is_told_again_and_says_what_goes_on_meanwhile(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_TELL_EVERY_S", 0.0)
    waits = Patience(60, "; episodes go on")
    for _ in range(3):
        waits.failed(AWAY, patience.time.monotonic())
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 3 and all(x.endswith("s more; episodes go on: url=x gave no answer") for x in said)
    assert waits.num_failures == 3


@pytest.mark.parametrize("failure", [AWAY, FULL])
def test_it_is_given_up_in_the_end_as_what_it_was(failure: WireError) -> None:
    with pytest.raises(type(failure), match="; given up after 0 s") as caught:
        ask_patiently(Service(*[failure] * 99), threading.Event(), 0.02)
    assert caught.value.status == failure.status and str(failure) in str(caught.value)


def test_a_refusal_is_an_answer() -> None:
    service = Service(WireError("column=a is missing", 422), AWAY)
    with pytest.raises(WireError, match=r"column=a is missing$"):
        ask_patiently(service, threading.Event())
    assert len(service.failures) == 1


def test_a_stop_ends_the_wait_but_no_request_that_is_answered() -> None:
    stop = threading.Event()
    stop.set()
    assert ask_patiently(Service(), stop) == 7
    with pytest.raises(Stopped):
        ask_patiently(Service(AWAY, AWAY), stop)
