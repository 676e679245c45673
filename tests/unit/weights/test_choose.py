from __future__ import annotations

import threading

import pytest

from astraflow.weights.fetch import choose as choose_module
from astraflow.weights.fetch.choose import FAILED_S, FORGET_S, Chooser

NEAR, FAR, DIRECTORY = "http://near/weights/a", "http://far/weights/a", "file:///run/weights/a"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def chooser(answers: dict[str, float | None], clock: Clock | None = None) -> Chooser:
    def probe(base: str) -> float:
        seconds = answers[base]
        if seconds is None:
            raise ConnectionRefusedError
        return seconds

    return Chooser(probe, clock or Clock())


def test_directories_come_first_and_then_who_answers_soonest() -> None:
    choose = chooser({"http://near": 0.001, "http://far": 0.3})
    assert choose.order((FAR, DIRECTORY, NEAR)) == [DIRECTORY, NEAR, FAR]


def test_one_store_alone_is_not_probed() -> None:
    assert chooser({}).order((DIRECTORY, FAR)) == [DIRECTORY, FAR]


def test_who_does_not_answer_comes_last() -> None:
    assert chooser({"http://near": None, "http://far": 0.3}).order((NEAR, FAR)) == [FAR, NEAR]


def test_all_are_probed_at_once_and_one_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_module, "PROBE_S", 20.0)
    together, over = threading.Barrier(3), threading.Event()

    def probe(base: str) -> float:
        together.wait(20.0)  # broken, and no answer, where they are asked one after the other
        return 0.1

    urls = [f"http://{name}/weights/a" for name in "abc"]
    choose = Chooser(probe)
    choose.order(urls)
    assert not any(choose.is_broken(url) for url in urls)

    def hang(base: str) -> float:
        if base == "http://a":
            over.wait(60.0)
        return 0.1

    monkeypatch.setattr(choose_module, "PROBE_S", 0.2)
    choose = Chooser(hang)
    assert choose.order(urls) == [*urls[1:], urls[0]] and choose.is_broken(urls[0])
    over.set()


def test_a_slow_link_is_left_for_one_that_is_not_known_yet_and_for_a_faster_one() -> None:
    choose = chooser({"http://near": 0.001, "http://far": 0.3})
    choose.order((NEAR, FAR))
    choose.fetched(NEAR, 1_000_000, 100.0)
    assert choose.order((NEAR, FAR)) == [FAR, NEAR]
    choose.fetched(FAR, 1_000_000, 300.0)
    assert choose.order((NEAR, FAR)) == [NEAR, FAR]


def test_a_store_that_failed_is_tried_again_later() -> None:
    clock = Clock()
    choose = chooser({"http://near": 0.001, "http://far": 0.3}, clock)
    choose.order((NEAR, FAR))
    choose.failed(NEAR)
    assert choose.order((NEAR, FAR)) == [FAR, NEAR]
    assert choose.is_broken(NEAR)
    clock.now = FAILED_S + 1
    assert not choose.is_broken(NEAR)
    assert choose.order((NEAR, FAR)) == [NEAR, FAR]


def test_a_store_is_measured_afresh_after_a_while() -> None:
    clock, answers = Clock(), dict[str, float | None]({"http://near": 0.001, "http://far": 0.3})
    choose = chooser(answers, clock)
    choose.order((NEAR, FAR))
    answers["http://far"] = 0.0001
    assert choose.order((NEAR, FAR)) == [NEAR, FAR]
    clock.now = FORGET_S + 1
    assert choose.order((NEAR, FAR)) == [FAR, NEAR]


def test_a_fast_store_nearby_is_not_left_to_try_a_distant_one_with_a_large_version() -> None:
    choose = chooser({"http://near": 0.001, "http://far": 0.15})
    choose.order((NEAR, FAR))
    choose.fetched(NEAR, 269_000_000, 0.5)
    assert choose.order((NEAR, FAR)) == [NEAR, FAR]


def test_small_fetches_go_to_who_answers_soon_and_large_ones_to_who_sends_fast() -> None:
    choose = chooser({"http://near": 0.001, "http://far": 0.3})
    choose.order((NEAR, FAR))
    choose.fetched(FAR, 100_000_000, 1.0)
    choose.fetched(NEAR, 100_000_000, 10.0)
    assert choose.order((NEAR, FAR)) == [FAR, NEAR]
    choose.fetched(NEAR, 1_000, 0.0001)
    assert choose.order((NEAR, FAR)) == [NEAR, FAR]
