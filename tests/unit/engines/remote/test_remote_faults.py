"""A service that is busy, broken, gone, or does not know the key; budgets; verdicts that are known."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from astraflow.engines.remote.budget import Budget, Limits
from astraflow.engines.remote.service import _seconds
from astraflow.engines.remote.verdicts import Verdict, Verdicts, key_of
from astraflow.errors import EngineError
from astraflow.types import Sampling
from fake_service import FakeService

Start = Callable[..., Any]


@pytest.mark.parametrize(
    "reply",
    [
        {"status": 429, "body": b"slow down", "headers": {"Retry-After": "0"}},
        {"status": 500, "body": b"oops"},
        {"status": 503, "body": b"", "headers": {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}},
        {"status": 200, "body": b'{"choices": ['},
        {"status": 200, "body": b"<html>"},
        {"status": 200, "body": b'{"choices": []}'},
        {"status": 200, "body": b'{"choices": [{"message": {"content": 5}}]}'},
        {"status": 200, "content": "never whole", "cut": b"{"},
    ],
)
def test_what_may_go_better_next_time_is_asked_again(start: Start, service: FakeService, reply: dict[str, Any]) -> None:
    service.replies.extend([reply, reply])
    asker = start()
    assert asker.ask("x") == "well"
    assert len(service.seen) == 3 and service.seen[0] == service.seen[2]
    assert asker.engine.stats()["remote_retries"] == 2


def test_a_hung_service_is_asked_again(start: Start, service: FakeService) -> None:
    service.replies.append({"hang": True})
    assert start(timeout_s=0.2).ask("x") == "well"


def test_a_service_that_stays_broken_fails_the_request_with_what_it_says(start: Start, service: FakeService) -> None:
    service.reply = lambda body: {"status": 500, "body": b"out of order"}
    with pytest.raises(EngineError, match=r"gave no verdict: .*500: out of order after 3 tries; see engine.retries"):
        start(retries=2).ask("x")
    assert len(service.seen) == 3


def test_a_service_that_is_not_there(start: Start) -> None:
    with pytest.raises(EngineError, match=r"gave no verdict: is lost .* after 2 tries"):
        start(url="http://127.0.0.1:9/v1", retries=1).ask("x")


@pytest.mark.parametrize("reply", [{"hang": True}, {"status": 500, "body": b"oops"}])
def test_nothing_waits_longer_than_the_deadline(start: Start, service: FakeService, reply: dict[str, Any]) -> None:
    service.reply = lambda body: reply
    with pytest.raises(EngineError, match=r"engine.deadline_s"):
        start(deadline_s=0.3, timeout_s=0.1, retries=10**9).ask("x")


def test_a_pause_beyond_the_deadline_is_not_waited_for(start: Start, service: FakeService) -> None:
    service.reply = lambda body: {"status": 429, "body": b"", "headers": {"Retry-After": "3600"}}
    with pytest.raises(EngineError, match=r"waiting 3600.0 s is beyond engine.deadline_s"):
        start().ask("x")
    assert len(service.seen) == 1


def test_when_one_is_told_to_wait_all_do(start: Start, service: FakeService) -> None:
    times: list[float] = []

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        times.append(time.monotonic())
        return {"content": "well"}

    service.reply = reply
    service.replies.append({"status": 429, "body": b"", "headers": {"Retry-After": "0.2"}})
    asker = start(concurrency=1)
    began = time.monotonic()
    futures = [asker.begin(str(number)) for number in range(3)]
    assert all(future.result(60) for future in futures)
    assert min(times) - began >= 0.2


@pytest.mark.parametrize(("status", "body"), [(400, b"no such model"), (404, b""), (429, b'"insufficient_quota"')])
def test_what_cannot_go_better_is_not_asked_again(start: Start, service: FakeService, status: int, body: bytes) -> None:
    service.replies.append({"status": status, "body": body})
    asker = start()
    with pytest.raises(EngineError, match=str(status)):
        asker.ask("x")
    assert len(service.seen) == 1 and asker.ask("x") == "well"


def test_a_wrong_key_ends_the_engine_and_is_never_said(
    start: Start, service: FakeService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    service.key = "sk-right-0123456789"
    monkeypatch.setenv("JUDGE_KEY", "sk-wrong-0123456789")
    asker = start(key_env="JUDGE_KEY")
    future = asker.begin("x")
    ended_first: list[bool] = []
    future.add_done_callback(lambda _: ended_first.append(asker.engine.ended.done()))
    error = future.exception(60)
    assert error is not None and "engine.key_env" in str(error) and ended_first == [True]
    assert asker.engine.ended.result(60) is error
    with pytest.raises(EngineError, match=r"engine.key=\*\*\*"):
        asker.ask("y")
    service.replies.append({"status": 500, "body": b"Bearer sk-wrong-0123456789"})
    assert "0123456789" not in str(error) + caplog.text


def test_a_key_that_is_refused_later_fails_the_request_alone(
    start: Start, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-0123456789")
    asker = start(key_env="JUDGE_KEY", cache="none", retries=0)
    assert asker.ask("x") == "well"
    service.replies.append({"status": 401, "body": b"a slip with sk-0123456789"})
    with pytest.raises(EngineError, match=r"is not known to") as caught:
        asker.ask("x")
    assert "0123456789" not in str(caught.value)
    service.replies.append({"status": 500, "body": b"you said sk-0123456789"})
    with pytest.raises(EngineError, match=r"you said \*\*\*"):
        asker.ask("x")
    assert asker.ask("x") == "well" and not asker.engine.ended.done()


def test_budgets_of_an_episode_fail_its_requests_alone(start: Start, service: FakeService) -> None:
    asker = start(episode_requests=2, cache="none")
    assert [asker.ask("x"), asker.ask("x")] == ["well", "well"]
    with pytest.raises(EngineError, match=r"engine.episode_requests=2 is used up"):
        asker.ask("x")
    assert asker.ask("x", episode="e/2") == "well" and len(service.seen) == 3
    poor = start(episode_tokens=15, cache="none")  # each takes ten
    assert [poor.ask("x"), poor.ask("x")] == ["well", "well"]
    with pytest.raises(EngineError, match=r"engine.episode_tokens=15 is used up"):
        poor.ask("x")


@pytest.mark.parametrize("limit", [{"node_requests": 2}, {"node_tokens": 20}])
def test_the_budget_of_a_node_ends_the_engine(start: Start, service: FakeService, limit: dict[str, int]) -> None:
    asker = start(**limit)
    assert [asker.ask("x"), asker.ask("x"), asker.ask("y")] == ["well"] * 3, "what is known costs nothing"
    (name,) = limit
    with pytest.raises(EngineError, match=rf"engine.{name}={limit[name]} is used up"):
        asker.ask("z")
    assert name in str(asker.engine.ended.result(60)) and len(service.seen) == 2


def test_tokens_that_a_service_does_not_count_are_guessed(start: Start, service: FakeService) -> None:
    service.reply = lambda body: {"content": "x" * 400, "usage": None}
    asker = start()
    asker.ask("y" * 400)
    assert 200 <= asker.engine.stats()["remote_tokens"] < 300


def test_counts_of_old_episodes_are_forgotten() -> None:
    budget = Budget(Limits(episode_requests=1))
    for number in range(5000):
        budget.ask(str(number))
    assert len(budget._episodes) == 4096
    budget.ask("0")
    with pytest.raises(EngineError):
        budget.ask("4999")


def test_equal_questions_at_temperature_zero_are_asked_once(start: Start, service: FakeService) -> None:
    asker = start()
    futures = [asker.begin("same") for _ in range(5)]
    assert {asker.chat.decode(future.result(60).token_ids) for future in futures} == {"well"}
    assert asker.ask("same") == "well" and asker.ask("other") == "well"
    assert asker.ask("same", Sampling(temperature=0.0, max_tokens=7)) == "well"
    assert [body["max_tokens"] for body in service.seen] == [256, 256, 7]
    assert asker.engine.stats()["remote_known"] == 5


def test_what_is_sampled_is_asked_each_time_unless_all_are_kept(start: Start, service: FakeService) -> None:
    hot, asker, keeper = Sampling(temperature=1.0), start(), start(cache="all")
    assert [asker.ask("x", hot), asker.ask("x", hot)] == ["well"] * 2 and len(service.seen) == 2
    assert [keeper.ask("x", hot), keeper.ask("x", hot)] == ["well"] * 2 and len(service.seen) == 3
    none = start(cache="none")
    assert [none.ask("x"), none.ask("x")] == ["well"] * 2 and len(service.seen) == 5


def test_who_gives_up_does_not_take_the_verdict_from_others(start: Start, service: FakeService) -> None:
    service.replies.append({"hang": True})
    asker = start(timeout_s=0.5)
    first, second = asker.begin("same"), asker.begin("same")
    asker.engine.cancel("e/1/judge/1")
    assert first.result(60).finish_reason == "cancelled"
    assert second.result(60).finish_reason == "stop" and len(service.seen) == 2
    service.replies.append({"hang": True})
    third = asker.begin("third")
    asker.engine.cancel("e/1/judge/3")
    assert third.result(60).finish_reason == "cancelled"
    assert asker.ask("third") == "well", "nobody joins what was given up"


def test_failures_are_not_kept(start: Start, service: FakeService) -> None:
    service.replies.append({"status": 400, "body": b"no"})
    asker = start()
    with pytest.raises(EngineError):
        asker.ask("x")
    assert asker.ask("x") == "well"


def test_verdicts_in_a_directory_outlive_the_engine(start: Start, service: FakeService, tmp_path: Path) -> None:
    first = start(cache_dir=str(tmp_path / "verdicts"))
    assert first.ask("x") == "well"
    first.engine.close()
    second, third = (start(cache_dir=str(tmp_path / "verdicts")) for _ in range(2))
    assert second.ask("x") == third.ask("x") == "well" and len(service.seen) == 1
    elsewhere = FakeService()
    try:
        assert start(cache_dir=str(tmp_path / "verdicts"), url=elsewhere.url).ask("x") == "well"
        assert len(elsewhere.seen) == 1, "another service may judge otherwise"
    finally:
        elsewhere.close()


def test_a_directory_that_breaks_costs_no_episode(
    start: Start, service: FakeService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asker = start(cache_dir=str(tmp_path))
    with sqlite3.connect(tmp_path / "verdicts.sqlite") as other:
        other.execute("DROP TABLE verdicts")
    other.close()
    assert [asker.ask("x"), asker.ask("x")] == ["well"] * 2 and len(service.seen) == 2
    assert caplog.text.count("verdicts are kept no more") == 1


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    verdicts = Verdicts(str(tmp_path), 32)
    for number in range(32):
        verdicts.keep(key_of("u", {"n": number}), Verdict(str(number)))
    assert verdicts.find(key_of("u", {"n": 0})) == Verdict("0")
    verdicts.keep(key_of("u", {"n": 32}), Verdict("32"))
    found = [verdicts.find(key_of("u", {"n": number})) for number in range(33)]
    assert [number for number, verdict in enumerate(found) if verdict is None] == [1, 2, 3]
    verdicts.close()
    verdicts.close()
    assert verdicts.find("x") is None


@pytest.mark.parametrize(
    ("header", "seconds"), [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("", None), ("soon", None), ("nan", None)]
)
def test_retry_after(header: str, seconds: float | None) -> None:
    assert _seconds(header) == seconds
    assert 55 < (_seconds(formatdate(time.time() + 60, usegmt=True)) or 0) <= 60
