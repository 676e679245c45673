"""What a service is asked, and what becomes of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.rooms import build
from astraflow.errors import EngineError, Problem
from astraflow.models.remote.transcript import EOS
from astraflow.types import EffectiveWeights, Message, Sampling
from fake_service import FakeService

Start = Callable[..., Any]
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}


def hangs(service: FakeService, requests: int) -> None:
    """Waits until so many are held."""
    end = time.monotonic() + 60
    while service.held < requests:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_verdict_is_asked_for_in_messages_and_kept_as_characters(start: Start, service: FakeService) -> None:
    service.reply = lambda body: {"content": "good: 7 €"}
    asker, handed = start(), []
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=64, seed=3)
    messages: list[Message] = [{"role": "system", "content": "be fair"}, {"role": "user", "content": "mark\n{this}"}]
    generation = asker.begin(messages, sampling, sink=lambda *columns: handed.append(columns)).result(60)
    assert service.seen == [{
        "model": "a-model", "messages": messages, "temperature": 0.7, "top_p": 0.9, "max_tokens": 64, "top_k": 5,
        "min_p": 0.1, "seed": 3,
    }]  # fmt: skip
    assert service.keys == [None]
    ids = [ord(character) for character in "good: 7 €"] + [EOS]
    assert generation.token_ids.tolist() == ids and generation.finish_reason == "stop"
    assert generation.versions.tolist() == [0] * len(ids) == [-logprob for logprob in generation.logprobs]
    assert handed == [(ids, [0.0] * len(ids), [0] * len(ids))]
    stats = asker.engine.stats()
    assert (stats["sampled_tokens"], stats["remote_tokens"], stats["requests"]) == (0, 10, 1)


def test_what_a_service_does_not_take_is_left_out_and_more_may_be_said(start: Start, service: FakeService) -> None:
    asker = start(
        extra={"reasoning_effort": "low"}, omit=["temperature", "top_p"], tokens_field="max_completion_tokens"
    )
    asker.ask("a", Sampling(max_tokens=9))
    (body,) = service.seen
    assert {name: body[name] for name in body if name != "messages"} == {
        "model": "a-model", "max_completion_tokens": 9, "reasoning_effort": "low",
    }  # fmt: skip


def test_calls_come_as_a_model_writes_them_and_go_back_as_the_agent_sends_them(
    start: Start, service: FakeService
) -> None:
    service.reply = lambda body: {"content": "Let me see. ", "calls": [("calc", '{"b": 1,  "a": [2]}'), ("odd", "{")]}
    asker = start()
    generation = asker.begin("1+1", tools=[TOOL]).result(60)
    assert service.seen[0]["tools"] == [TOOL]
    said = asker.chat.decode(generation.token_ids)
    assert said == (
        'Let me see.\n<tool_call>\n{"name":"calc","arguments":{"b":1,"a":[2]}}\n</tool_call>\n'
        '<tool_call>\n{"name":"odd","arguments":"{"}\n</tool_call>'
    )
    call = {"id": "call_0_0", "type": "function", "function": {"name": "calc", "arguments": {"b": 1}}}
    asker.ask([
        {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "call_0_0"},
    ])  # fmt: skip
    sent = service.seen[1]["messages"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"b":1}'}
    assert sent[1]["content"] == "so" and sent[2]["tool_call_id"] == "call_0_0"


def test_length_and_stops_end_a_reply(start: Start, service: FakeService) -> None:
    asker = start(cache="none")
    service.reply = lambda body: {"content": "abcdef", "finish": "length"}
    cut = asker.begin("x").result(60)
    assert (asker.chat.decode(cut.token_ids, False), cut.finish_reason) == ("abcdef", "length")
    stopped = asker.begin("x", Sampling(temperature=0.0, stop_token_ids=(ord("c"),))).result(60)
    assert (asker.chat.decode(stopped.token_ids, False), stopped.finish_reason) == ("abc", "stop")
    service.reply = lambda body: {"content": None}
    assert asker.begin("x").result(60).token_ids.tolist() == [EOS]
    service.reply = lambda body: {"content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}
    assert asker.ask("x") == "in parts"
    service.reply = lambda body: {"content": "a\x1eb"}
    assert asker.ask("x") == "a�b", "the EOS ends a reply, it is not within one"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"content": None, "finish": "length"}, "before it said a word; raise max_tokens"),
        ({"content": "", "finish": "content_filter"}, "will not answer this"),
    ],
)
def test_what_is_no_verdict_fails_the_request_alone(
    start: Start, service: FakeService, reply: dict[str, Any], message: str
) -> None:
    asker = start()
    service.replies.append(reply)
    with pytest.raises(EngineError, match=message):
        asker.ask("x")
    assert asker.ask("x") == "well"


def test_a_raw_prompt_is_no_conversation(start: Start) -> None:
    asker = start()
    with pytest.raises(EngineError, match="takes no raw prompts"):
        asker.engine.submit("a", asker.chat.encode("Once upon a time"), Sampling()).result(60)


def test_it_takes_no_weights(start: Start) -> None:
    engine = start().engine
    assert engine.version == 0
    with pytest.raises(EngineError, match="frozen = true"):
        engine.load_weights(1, {}).result(60)
    assert engine.effective_weights().result(60) == EffectiveWeights(0, "", "")


def test_no_more_than_so_many_are_asked_at_once(start: Start, service: FakeService) -> None:
    asker = start(concurrency=3)
    service.replies.extend({"hang": True} for _ in range(3))
    futures = [asker.begin(str(number)) for number in range(9)]
    hangs(service, 3)
    assert len(service.seen) == 3, "the others wait for a place"
    service.released.set()  # cut, and asked again
    assert {asker.chat.decode(future.result(60).token_ids) for future in futures} == {"well"}
    assert service.most_at_once == 3


def test_cancelling_frees_the_place(start: Start, service: FakeService) -> None:
    asker = start(concurrency=1)
    service.replies.append({"hang": True})
    first = asker.begin("a")
    hangs(service, 1)
    second = asker.begin("b")
    asker.engine.cancel("e/1/judge/1")
    generation = first.result(60)
    assert (generation.token_ids.size, generation.finish_reason) == (0, "cancelled")
    assert second.result(60).finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "judge.example/v1"}, r"engine.url=judge.example/v1 must start with http"),
        ({"retries": -1}, "engine.retries=-1 must be >= 0"),
        ({"timeout_s": 0.0}, "engine.timeout_s"),
        ({"key_env": "NOT_SET_ANYWHERE"}, "engine.key_env=NOT_SET_ANYWHERE is not set"),
        ({"key_file": "/nowhere/key"}, "engine.key_file=/nowhere/key cannot be read"),
        ({"key_env": "A", "key_file": "b"}, "cannot be with engine.key_env"),
        ({"cache_dir": "/dev/null/x"}, "engine.cache_dir=/dev/null/x cannot keep verdicts"),
    ],
)
def test_options_that_are_none(start: Start, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        start(**options)


def test_a_key_comes_from_the_environment_or_a_file(
    start: Start, service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.key = "sk-from-the-environment"
    monkeypatch.setenv("JUDGE_KEY", "sk-from-the-environment")
    assert start(key_env="JUDGE_KEY").ask("x") == "well"
    (tmp_path / "key").write_text("sk-from-a-file\n")
    service.key = "sk-from-a-file"
    assert start(key_file=str(tmp_path / "key")).ask("x") == "well"
    (tmp_path / "key").write_text(" \n")
    with pytest.raises(EngineError, match="is empty"):
        start(key_file=str(tmp_path / "key"))
    (tmp_path / "key").write_text("two words")
    with pytest.raises(Problem) as caught:
        start(key_file=str(tmp_path / "key"))
    assert "two words" not in str(caught.value)


def test_a_run_file_builds_it(service: FakeService) -> None:
    options = {"url": service.url, "max_concurrency": 4, "threads": 1, "seed": 9}
    engine = build("engines", "remote", options, "policies.p.engine", model_dir="a-model")
    engine.close()
