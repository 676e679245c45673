from __future__ import annotations

import signal
import threading

import pytest

from astraflow.observe.process import stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_sets_the_event_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_no_handler_is_set() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with stop_signals() as stop:
            seen.append((stop.is_set(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(60)
    assert seen == [(False, before)]
