from __future__ import annotations

import signal
import subprocess
import sys
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


def test_a_command_is_hardly_looked_through_by_the_collector() -> None:
    """Neither while its modules load nor, frozen, at its end: that would be a third of its time beside torch."""
    script = (
        "import atexit, gc, sys, astraflow.__main__ as command\n"
        "sys.argv = ['astraflow', '--version']\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000, gc.get_threshold()[0] > 10_000))\n"
        "sys.exit(command.main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-2:] == ["True", "True"]


@pytest.mark.parametrize(("target", "code"), [("recipe_path", 1), ("lambda words: words.nothing", 0)])
def test_a_thread_of_ours_that_dies_ends_the_process_by_name(target: str, code: int) -> None:
    """One of a user is logged, and the process goes on."""
    script = (
        "import threading\n"
        "from astraflow.config.recipes import recipe_path\n"
        "from astraflow.observe.process import end_with_own_threads\n"
        "end_with_own_threads()\n"
        f"thread = threading.Thread(target={target}, args=(7,), name='pulse of judge')\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code
    assert "thread 'pulse of judge' died of " in done.stderr and "Traceback" in done.stderr
