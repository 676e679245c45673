"""What workflows return, what clients get, what goes to the dataflow service, and where weights come from."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import EpisodeError, Unauthorized, Unreachable, WeightError, WireError
from astraflow.rollout.commit import MAX_EPISODES, Committer, Reach
from astraflow.rollout.loop import Guarded, in_thread
from astraflow.rollout.policies import Weights
from astraflow.rollout.worker.channel import Answer, Cancel, Done, Drop, Hello, Start
from astraflow.rollout.worker.client import LLM, CallError
from astraflow.rollout.worker.player import Worker
from astraflow.types import Outcome, Task, WeightVersion
from astraflow.wire.messages import EpisodesReply
from astraflow.wire.swarm.outcome import outcome_of


@given(st.none() | st.floats(-9, 9) | st.integers(-9, 9) | st.booleans())
def test_numbers_and_none_are_rewards(value):
    assert outcome_of(value) == Outcome(reward=None if value is None else float(value))


def test_dicts_numpy_scalars_and_outcomes_are_rewards():
    assert outcome_of({"a": 1, "b": None}) == Outcome(reward={"a": 1.0, "b": None})
    assert outcome_of(np.float32(0.5)) == Outcome(reward=0.5)
    whole = Outcome(reward=1.0, rewards_per_call={"a": [0.0, 1.0]}, metrics={"success": 1.0})
    assert outcome_of(whole) == whole
    listed = Outcome(reward=1.0, rewards_per_call=[np.float32(0.5), 1])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(outcome_of(listed)), type=Outcome)
    assert sent == outcome_of(listed) == Outcome(reward=1.0, rewards_per_call=[0.5, 1.0])
    odd = Outcome(reward={"a": np.float32(0.5)}, rewards_per_call={"a": np.ones(2)}, metrics={"n": 10**30, "\udcff": 1})
    plain = outcome_of(odd)
    assert plain == Outcome(
        reward={"a": 0.5}, rewards_per_call={"a": [1.0, 1.0]}, metrics={"n": 1e30, r"\udcff": 1.0}
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=Outcome) == plain


@pytest.mark.parametrize(
    "value",
    [
        math.nan, math.inf, "1.0", [1.0], {"a": "x"}, {"a": math.nan}, object(), 1j, Outcome(reward=-math.inf),
        Outcome(metrics={"x": math.nan}), Outcome(rewards_per_call={"a": [math.inf]}), Outcome(metrics={"x": "y"}),
        Outcome(reward="high"), 10**400, 1e300, Outcome(metrics={"x": None}), Outcome(metrics=[1.0]),
        Outcome(rewards_per_call={"a": 1.0}), Outcome(rewards_per_call=[math.nan]), Outcome(rewards_per_call=1.0),
    ],
)  # fmt: skip
def test_anything_else_is_an_error_of_the_reward(value):
    with pytest.raises(EpisodeError, match=r"^reward: "):
        outcome_of(value)


def client(status, body):
    asked = []

    async def ask(request):
        asked.append(msgspec.json.decode(request))
        return status, msgspec.json.encode(body)

    return LLM("actor", ask, "http://127.0.0.1:1/v1", "key"), asked


COMPLETION = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "actor",
    "choices": [{
        "index": 0, "finish_reason": "tool_calls",
        "message": {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_0_0", "type": "function", "function": {"name": "calc", "arguments": '{"expr": "3*4"}'}},
            {"id": "call_0_1", "type": "function", "function": {"name": "calc", "arguments": "oops"}},
        ]},
    }],
    "usage": {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9},
}  # fmt: skip


async def test_a_reply_has_text_tool_calls_and_the_message_to_append():
    llm, asked = client(200, COMPLETION)
    reply = await llm.chat([{"role": "user", "content": "?"}], tools=[], max_tokens=5)
    assert asked == [{"model": "actor", "messages": [{"role": "user", "content": "?"}], "tools": [], "max_tokens": 5}]
    assert str(reply) == reply.content == ""
    assert [(c.id, c.name, c.arguments, c.text) for c in reply.tool_calls] == [
        ("call_0_0", "calc", {"expr": "3*4"}, '{"expr": "3*4"}'), ("call_0_1", "calc", {}, "oops"),
    ]  # fmt: skip
    assert reply.message == COMPLETION["choices"][0]["message"]
    assert (reply.finish_reason, reply.usage["total_tokens"]) == ("tool_calls", 9)


async def test_the_openai_form_gives_attributes():
    llm, asked = client(200, COMPLETION)
    completion = await llm.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "?"}], n=1)
    assert asked[0]["model"] == "actor"
    message = completion.choices[0].message
    assert (message.content, message.tool_calls[0].function.name) == (None, "calc")
    assert message.model_dump(exclude_none=True)["tool_calls"][0]["id"] == "call_0_0"
    assert completion.usage.total_tokens == 9


@pytest.mark.parametrize("model", ["actor@planner", "gpt-4@planner"])
async def test_an_agent_may_have_a_name(model):
    llm, asked = client(200, COMPLETION)
    await llm.chat.completions.create(model=model, messages=[])
    await llm.chat([], model="actor@planner")
    assert [body["model"] for body in asked] == ["actor@planner"] * 2


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "too long", "type": "x", "code": "context_length_exceeded"}}, "overlong"),
        (400, {"error": {"message": "n must be 1", "type": "x", "code": None}}, "gateway"),
        (503, {"error": {"message": "engine", "type": "server_error"}}, "engine"),
        (502, ["nonsense"], "gateway"),
    ],
)
async def test_a_refused_call_says_its_kind(status, body, kind):
    llm, _ = client(status, body)
    with pytest.raises(CallError) as error:
        await llm.chat([])
    assert (error.value.kind, error.value.status) == (kind, status)
    assert str(error.value).startswith(f"{kind}: ")


def episode(number):
    return SimpleNamespace(episode_id=f"e{number}")


class Sink:
    """A dataflow service that keeps what it is sent, after `failures` times no answer."""

    def __init__(self, failures=0, results=None, error=None):
        self.failures, self.results, self.batches = failures, results, []
        self.more = []
        self.error = error or Unreachable("url=x gave no answer")

    def __call__(self, episodes, more=None):
        self.more.append(more)
        if self.failures:
            self.failures -= 1
            raise self.error
        self.batches.append([e.episode_id for e in episodes])
        return EpisodesReply(self.results or {e.episode_id: "accepted" for e in episodes}, finished=more is not None)


async def committed(sink, count, give_up_s=60.0):
    committer = Committer(sink, Reach(give_up_s))
    for number in range(count):
        committer.add(episode(number))
    loop = asyncio.create_task(committer.run())
    waiter = asyncio.create_task(committer.settled())
    async with asyncio.timeout(60):
        await asyncio.wait({loop, waiter}, return_when=asyncio.FIRST_COMPLETED)
    for task in (loop, waiter):
        task.cancel()
    if loop.done() and not loop.cancelled():
        loop.result()
    return committer


async def test_what_finished_leaves_together_in_bounded_requests():
    sink = Sink()
    committer = await committed(sink, MAX_EPISODES + 10)
    assert [len(b) for b in sink.batches] == [MAX_EPISODES, 10]
    assert committer.results == {"accepted": MAX_EPISODES + 10}


async def test_what_finishes_soon_after_a_request_is_gathered_into_one_more(monkeypatch):
    monkeypatch.setattr("astraflow.rollout.commit._APART_S", 1.0)
    sink = Sink()
    committer = Committer(sink, Reach(60.0))
    loop = asyncio.create_task(committer.run())
    async with asyncio.timeout(60):
        for number in range(4):  # the first goes at once; the others one by one, each after the one before could have
            committer.add(episode(number))
            if number == 0:
                await committer.settled()
            for _ in range(5):
                await asyncio.sleep(0)
        while committer.backlog:
            await asyncio.sleep(0.01)
    loop.cancel()
    assert sink.batches == [["e0"], ["e1", "e2", "e3"]]


async def test_nothing_is_gathered_while_somebody_waits_for_it(monkeypatch):
    monkeypatch.setattr("astraflow.rollout.commit._APART_S", 600.0)
    sink = Sink()
    committer = Committer(sink, Reach(60.0))
    loop = asyncio.create_task(committer.run())
    async with asyncio.timeout(60):
        for number in range(3):
            committer.add(episode(number))
            if number == 1:  # the loop is in the middle of gathering
                await asyncio.sleep(0.01)
            await committer.settled()
            assert committer.backlog == 0
    loop.cancel()
    assert sink.batches == [["e0"], ["e1"], ["e2"]]


async def test_the_request_that_brings_the_last_episode_asks_for_the_next_leases(monkeypatch):
    monkeypatch.setattr("astraflow.rollout.commit._PAUSE_S", 0.0)
    sink = Sink(failures=2)
    committer = Committer(sink, Reach(60.0))
    for number in range(MAX_EPISODES + 10):
        committer.add(episode(number))
    loop = asyncio.create_task(committer.run())
    async with asyncio.timeout(60):
        reply = await committer.exchange(7)
        assert await committer.exchange(1) is None  # there is nothing to commit
        committer.add(episode(-1))
        await committer.settled()
    loop.cancel()
    assert reply.finished and [len(b) for b in sink.batches] == [MAX_EPISODES, 10, 1]
    assert [more and more.n for more in sink.more] == [None, None, None, 7, None]


async def test_leases_are_asked_for_again_with_the_commit_whose_answer_was_lost(monkeypatch):
    monkeypatch.setattr("astraflow.rollout.commit._PAUSE_S", 0.0)
    sink = Sink(failures=2)
    committer = Committer(sink, Reach(60.0))
    committer.add(episode(0))
    loop = asyncio.create_task(committer.run())
    async with asyncio.timeout(60):
        await committer.exchange(7)
        committer.add(episode(1))
        await committer.exchange(7)
    loop.cancel()
    first, *again, other = sink.more
    assert again == [first] * 2 and other.request_id != first.request_id


async def test_a_commit_is_repeated_while_the_service_is_away():
    sink = Sink(failures=2)
    committer = await committed(sink, 3)
    assert sink.batches == [["e0", "e1", "e2"]]
    assert committer.reach.num_failures == 2


async def test_one_message_says_what_all_loops_of_a_node_wait_for(caplog, monkeypatch):
    monkeypatch.setattr("astraflow.rollout.commit._PAUSE_S", 0.0)
    reach, sinks = Reach(60.0), [Sink(failures=4) for _ in range(3)]
    await asyncio.gather(*(reach.ask("commit", lambda s=s: s([])) for s in sinks))
    assert reach.num_failures == 12
    said = [r.getMessage() for r in caplog.records if "waits for the dataflow service" in r.getMessage()]
    assert len(said) == 1 and "up to 60 s more" in said[0]


async def test_a_commit_is_repeated_while_the_disk_is_full_and_given_up_in_the_end():
    full = WireError("journal=x cannot be written; make room", 507)
    sink = Sink(failures=2, error=full)
    committer = await committed(sink, 3)
    assert (sink.batches, committer.reach.num_failures) == ([["e0", "e1", "e2"]], 2)
    with pytest.raises(WireError, match="cannot be written; make room; given up after") as caught:
        await committed(Sink(failures=99, error=full), 1, give_up_s=0.1)
    assert caught.value.status == 507


async def test_a_refused_commit_is_not_repeated():
    with pytest.raises(WireError, match="column"):
        await committed(Sink(failures=1, error=WireError("column=a is missing", 422)), 1)


async def test_refused_and_duplicate_episodes_are_counted():
    results = {"e0": "accepted", "e1": "duplicate", "e2": "refused: attempt 1 is not held"}
    assert (await committed(Sink(results=results), 3)).results == {"accepted": 1, "duplicate": 1, "refused": 1}


async def test_a_service_that_stays_away_ends_the_commit_loop():
    with pytest.raises(Unreachable, match="given up after"):
        await committed(Sink(failures=99), 1, give_up_s=-1.0)


class Store:
    """A weight client that fails as told before it succeeds."""

    def __init__(self, *failures, whole=()):
        """`whole`: versions without a delta."""
        self.failures, self.whole = list(failures), whole
        self.asked, self.held = [], []

    def fetch(self, wanted, held):
        self.asked.append(wanted.version)
        self.held.append(held and held.version)
        if self.failures:
            raise self.failures.pop(0)
        manifest = SimpleNamespace(delta=None if wanted.version in self.whole else "delta")
        return SimpleNamespace(version=wanted.version, tensors={}, held=SimpleNamespace(manifest=manifest))


async def test_a_fetch_is_tried_again_and_counted():
    store = Store(WeightError("version", 3, "is torn", "again"), WireError("gone", 502))
    weights = Weights("actor", store, lambda: None)
    weights.announce(WeightVersion("actor", 3, ("file:///x",)))
    async with asyncio.timeout(60):
        assert (await weights.fetch_newer(2)).version == 3
    assert (store.asked, weights.num_failures) == ([3, 3, 3], 2)


async def test_what_was_fetched_is_the_base_of_the_next_delta_unless_versions_travel_whole():
    store = Store(whole=(0, 3, 4))
    weights = Weights("actor", store, lambda: None)
    async with asyncio.timeout(60):
        for version in range(7):
            weights.announce(WeightVersion("actor", version, ("file:///x",)))
            await weights.fetch_newer(version - 1)
    assert store.held == [None, 0, 1, 2, None, None, 5]


async def test_the_newest_announced_version_is_fetched_and_older_news_are_ignored():
    store = Store()
    weights = Weights("actor", store, lambda: None)
    for version in (3, 5, 4):
        weights.announce(WeightVersion("actor", version, ("file:///x",)))
    async with asyncio.timeout(60):
        assert (await weights.fetch_newer(3)).version == 5
        waiting = asyncio.create_task(weights.fetch_newer(5))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        weights.announce(WeightVersion("actor", 6, ("file:///x",)))
        assert (await waiting).version == 6


async def test_a_wrong_token_at_the_store_is_not_tried_again():
    weights = Weights("actor", Store(Unauthorized("token", 401)), lambda: None)
    weights.announce(WeightVersion("actor", 0, ("http://x",)))
    with pytest.raises(Unauthorized):
        await weights.fetch_newer(-1)


async def test_a_background_task_that_fails_ends_everything_by_name():
    async def fail():
        raise ValueError("boom")

    async def forever():
        await asyncio.Event().wait()

    tasks = Guarded("node n")
    other = tasks.spawn("other loop", forever())
    tasks.spawn("lease loop", fail())
    with pytest.raises(Exception, match=r"'lease loop' of node n died of ValueError: boom"):
        await tasks.run(forever(), asyncio.Event())
    assert other.cancelled()


async def test_a_callback_that_fails_ends_everything():
    def fail():
        raise ValueError("boom")

    async def main():
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.Event().wait()

    with pytest.raises(Exception, match=r"callback .* died of ValueError: boom"):
        await Guarded("node n").run(main(), asyncio.Event())


async def test_a_thread_gives_results_and_errors():
    assert await in_thread(lambda: 3, "t") == 3
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0, "t")
    with pytest.raises(RuntimeError, match="SystemExit"):
        await in_thread(lambda: exec("raise SystemExit(3)"), "t")  # noqa: S102


async def test_an_answer_and_a_cancel_in_one_turn_end_the_episode_as_cancelled():
    worker, sent, asked = Worker(), [], asyncio.Event()
    worker.channel = SimpleNamespace(send=lambda message: (sent.append(message), asked.set()))
    worker._begin(Hello("rollout_scripts:ask_once", {}, ["actor"], "http://127.0.0.1:1/v1", 60.0))
    asked.clear()
    worker._on_message(Start(0, "key", Task("train", 0, 0, {"text": "1+1?"}), 60.0))
    await asked.wait()
    ask = sent[-1]
    worker._on_message(Answer(ask.call, 200, b"{}"))
    worker._on_message(Cancel(0))
    await asyncio.wait(worker._episodes.values(), timeout=60)
    assert [m.error for m in sent if isinstance(m, Done)] == ["cancelled: the episode was stopped"]
    assert not [m for m in sent if isinstance(m, Drop)]
