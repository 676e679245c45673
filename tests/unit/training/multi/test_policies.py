from __future__ import annotations

import threading

import pytest

from astraflow.training.multi.policies import train_all


def test_all_are_trained_at_once() -> None:
    meeting, done = threading.Barrier(3, timeout=60), list[str]()

    def train(policy: str) -> None:
        meeting.wait()  # nobody passes before all are here
        done.append(policy)

    stop = threading.Event()
    train_all(["a", "b", "c"], train, stop)
    assert sorted(done) == ["a", "b", "c"] and not stop.is_set()


def test_one_that_fails_ends_the_others_and_is_named() -> None:
    stop, ended = threading.Event(), list[str]()

    def train(policy: str) -> None:
        if policy == "b":
            raise ValueError("b is broken")
        assert stop.wait(60)
        ended.append(policy)

    with pytest.raises(ValueError, match="b is broken"):
        train_all(["a", "b", "c"], train, stop)
    assert sorted(ended) == ["a", "c"]


def test_one_that_is_done_lets_the_others_go_on() -> None:
    first, stop = threading.Event(), threading.Event()

    def train(policy: str) -> None:
        if policy == "a":
            first.set()
        else:
            assert first.wait(60) and not stop.is_set()

    train_all(["a", "b"], train, stop)
