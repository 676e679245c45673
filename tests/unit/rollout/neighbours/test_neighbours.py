"""A policy's engines on other nodes: what they say arrives token by token, and they may come, go and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from astraflow.contracts import Engine
from astraflow.engines.scripted import Reply, ScriptedEngine
from astraflow.errors import EngineError
from astraflow.rollout.neighbours.door import create_engine_app
from astraflow.rollout.neighbours.engine import FarEngine
from astraflow.rollout.neighbours.places import Neighbours, Place
from astraflow.types import EpisodeLease, Generation, Sampling, Task
from astraflow.wire.app import bind, serve
from astraflow.wire.messages import Offer
from astraflow.wire.streams.engines import EngineState, Lent

IDS, LOGPROBS = list(range(3, 43)), [-0.1 * n for n in range(1, 41)]
PROMPT = [1, 5, 9]
TOKEN = "a-token"


def scripted(version: int = 0, held: bool = True) -> ScriptedEngine:
    """It says the same ids, from the place where its prompt ends."""

    def script(prompt: Any, number: int) -> Reply:
        at = len(prompt) - len(PROMPT)
        return Reply(IDS[at:], LOGPROBS[at:])

    engine = ScriptedEngine(script, held=held)
    engine.load_weights(version, {}).result(0)
    return engine


@asynccontextmanager
async def lent(engines: Mapping[str, Sequence[Engine]], token: str | None = TOKEN) -> AsyncIterator[str]:
    """The engines of a node; gives its URL. They end with it."""
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    sock = bind("127.0.0.1", 0, "test")
    app = create_engine_app(engines, token)
    server = asyncio.create_task(serve(app, sock, url.set_result, stop, grace_s=1.0))
    try:
        yield await url
    finally:
        for each in engines.values():
            for engine in each:
                engine.close()
        stop.set()
        await server
        sock.close()


class Node:
    """One that lacks the policy `p`."""

    def __init__(self, unserved_s: float = 10.0, token: str | None = TOKEN) -> None:
        self.neighbours = Neighbours(["p"], "here", token, lambda: None)
        self.engine = FarEngine("p", 0, self.neighbours, unserved_s)

    def hear(self, *urls: str, host: str = "here", kinds: Sequence[str] = ()) -> None:
        names = [*kinds, *["local-float32"] * len(urls)]
        offers = [Offer(url, host, f"{names[n]}@node{n}") for n, url in enumerate(urls)]
        self.neighbours.hear({"p": offers})

    def ask(self, name: str = "e/1", sink: Any = None, **sampling: Any) -> asyncio.Future[Generation]:
        submitted = self.engine.submit(f"{name}/p/0", PROMPT, Sampling(**sampling), sink)
        return asyncio.wrap_future(submitted)


@asynccontextmanager
async def a_node(**options: Any) -> AsyncIterator[Node]:
    node = Node(**options)
    watch = asyncio.create_task(node.neighbours.watch())
    try:
        yield node
    finally:
        node.engine.close()
        watch.cancel()
        await asyncio.wait({watch})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.002)


def lease(episode_id: str = "e", version: int = -1) -> EpisodeLease:
    return EpisodeLease(
        episode_id=episode_id, group_id="g", attempt=1, task=Task("train", 0, 0, {}), timeout_s=9.0,
        min_versions={"p": version}, sampling={},
    )  # fmt: skip


async def test_ids_logprobs_and_versions_are_those_of_the_other_engine() -> None:
    engine, handed = scripted(4), list[tuple[int, float, int]]()
    async with lent({"p": [engine]}) as url, a_node() as node:
        node.hear(url)
        await node.engine.found()
        assert (node.engine.version, node.engine.max_context) == (4, engine.max_context)
        node.engine.expect(lease())
        future = node.ask(sink=lambda *columns: handed.extend(zip(*columns, strict=True)), max_tokens=30)
        await until(lambda: engine.stats()["running"] == 1)
        engine.step(7)
        await until(lambda: len(handed) == 7)
        engine.load_weights(5, {}).result(0)
        engine.release()
        generation = await future
    assert generation.token_ids.tolist() == IDS[:30] and generation.finish_reason == "length"
    assert generation.logprobs.tolist() == pytest.approx(LOGPROBS[:30], rel=1e-6)
    assert generation.versions.tolist() == [4] * 7 + [5] * 23
    assert [each[0] for each in handed] == IDS[:30] and [each[2] for each in handed] == generation.versions.tolist()
    assert node.engine.sampled_by("e", 1) == "local-float32@node0"
    assert node.engine.sampled_by("e", 1) == "", "it is forgotten"


async def test_requests_in_no_hurry_arrive_too_and_many_at_once() -> None:
    async with lent({"p": [scripted(held=False)]}) as url, a_node() as node:
        node.hear(url)
        generations = await asyncio.gather(*(node.ask(f"e{n}/1", max_tokens=1 + n % 30) for n in range(100)))
        assert [each.token_ids.tolist() for each in generations] == [IDS[: 1 + n % 30] for n in range(100)]
        assert node.engine.stats()["running"] == 0 and node.engine.counts["far_tokens"] > 100


async def test_cancelling_ends_it_there() -> None:
    engine, handed = scripted(), list[int]()
    async with lent({"p": [engine]}) as url, a_node() as node:
        node.hear(url)
        future = node.ask(sink=lambda ids, *_: handed.extend(ids), max_tokens=30)
        await until(lambda: engine.stats()["running"] == 1)
        engine.step(3)
        await until(lambda: len(handed) == 3)
        node.engine.cancel("e/1/p/0")
        generation = await future
        assert (generation.finish_reason, generation.token_ids.tolist()) == ("cancelled", IDS[:3])
        await until(lambda: engine.stats()["running"] == 0)


async def test_what_the_other_engine_refuses_fails_the_request_by_name() -> None:
    async with lent({"p": [scripted()]}) as url, a_node() as node:
        node.hear(url)
        with pytest.raises(EngineError, match=r"engine of p=http.* failed \(sampling.top_p=2"):
            await node.ask(top_p=2.0)


async def test_a_node_that_leaves_is_made_up_for_by_another_one_which_goes_on_after_its_tokens() -> None:
    first, second, handed = scripted(3), scripted(4), list[tuple[int, int]]()
    async with lent({"p": [second]}) as there, a_node() as node:
        async with lent({"p": [first]}) as url:
            node.hear(url)
            node.engine.expect(lease())
            future = node.ask(sink=lambda ids, _, versions: handed.extend(zip(ids, versions)), max_tokens=20)  # noqa: B905
            await until(lambda: first.stats()["running"] == 1)
            first.step(6)
            await until(lambda: len(handed) == 6)
        node.hear(there)  # the data service says who there is now
        await until(lambda: second.stats()["running"] == 1)
        second.release()
        generation = await future
        assert second.seen[-1][1].tolist() == PROMPT + IDS[:6]
    assert generation.token_ids.tolist() == IDS[:20]
    assert generation.versions.tolist() == [3] * 6 + [4] * 14 == [version for _, version in handed]
    assert node.engine.counts["far_lost"] == 1


async def test_an_engine_that_ends_is_left_by_its_requests() -> None:
    """Its node ends soon after; until then it answers."""
    first, second = scripted(), scripted(held=False)
    async with lent({"p": [first]}) as one, lent({"p": [second]}) as two, a_node() as node:
        node.hear(one)
        future = node.ask(max_tokens=5)
        await until(lambda: first.stats()["running"] == 1)
        node.hear(one, two)
        await until(lambda: len(node.neighbours.states("p", 0)) == 2)
        first.fail(EngineError("engine", "broken", "was told to", "start another"))
        for _ in range(3):  # a look says that it is there, a request that it is not
            if second.stats()["requests"]:
                break
            await asyncio.sleep(0)
        node.hear(two)
        assert (await future).token_ids.tolist() == IDS[:5]


async def test_tokens_of_one_episode_are_of_one_kind_of_engine() -> None:
    first, other = scripted(), scripted(held=False)
    async with lent({"p": [other]}) as there, a_node(unserved_s=0.3) as node:
        async with lent({"p": [first]}) as url:
            node.hear(url)
            node.engine.expect(lease())
            handed: list[int] = []
            future = node.ask(sink=lambda ids, *_: handed.extend(ids), max_tokens=20)
            await until(lambda: first.stats()["running"] == 1)
            first.step(2)
            await until(lambda: len(handed) == 2)
        node.hear(there, kinds=["local-bfloat16"])
        with pytest.raises(EngineError, match=r"policies.p=no node has served it by local-float32, which began"):
            await future
        node.engine.expect(lease("new"))
        assert len((await node.ask("new/1", max_tokens=2)).token_ids) == 2
        assert node.engine.sampled_by("new", 1) == "local-bfloat16@node0"


async def test_nobody_serves_it() -> None:
    async with a_node(unserved_s=0.1) as node:
        with pytest.raises(
            EngineError, match=r"policies.p=no node has served it for rollout.unserved_s=0.1 s"
        ) as caught:
            await node.engine.found()
        assert "astraflow node --serves p" in caught.value.fix
        with pytest.raises(EngineError, match="no node has served it"):
            await node.ask()


async def test_an_engine_that_is_added_is_found_by_who_waits() -> None:
    async with a_node() as node:
        future = node.ask(max_tokens=3)
        async with lent({"p": [scripted(held=False)]}) as url:
            node.hear(url)
            assert len((await future).token_ids) == 3


async def test_an_episode_is_served_by_no_version_older_than_its_lease_allows() -> None:
    old, new = scripted(1, held=False), scripted(2, held=False)
    async with lent({"p": [old]}) as one, lent({"p": [new]}) as two, a_node() as node:
        node.hear(one, two)
        await until(lambda: len(node.neighbours.states("p", 0)) == 2)
        for number in range(10):
            node.engine.expect(lease(f"e{number}", 2))
            assert set((await node.ask(f"e{number}/1", max_tokens=3)).versions.tolist()) == {2}
        assert node.engine.version == 2 and old.stats()["requests"] == 0
        old.load_weights(3, {}).result(0)
        await until(lambda: node.engine.version == 3)


async def test_a_place_that_fell_behind_is_left_by_its_episodes() -> None:
    first, second = scripted(2, held=False), scripted(2, held=False)
    async with lent({"p": [first]}) as one, lent({"p": [second]}) as two, a_node() as node:
        node.hear(one)
        node.engine.expect(lease(version=2))
        assert set((await node.ask(max_tokens=3)).versions.tolist()) == {2}
        first.load_weights(1, {}).result(0)  # as after a restart
        node.hear(one, two)
        await until(lambda: sorted(state.version for state in node.neighbours.states("p", 0)) == [1, 2])
        assert set((await node.ask(max_tokens=3)).versions.tolist()) == {2}
        assert second.stats()["requests"] == 1


async def test_calls_of_an_episode_go_to_one_place_and_episodes_are_shared_out() -> None:
    engines = [scripted() for _ in range(2)]
    async with lent({"p": engines[:1]}) as one, lent({"p": engines[1:]}) as two, a_node() as node:
        node.hear(one, two)
        await until(lambda: len(node.neighbours.states("p", 0)) == 2)
        for number in range(4):
            node.engine.expect(lease(f"e{number}"))
        calls = [node.engine.submit(f"e{n}/1/p/{call}", PROMPT, Sampling()) for call in range(3) for n in range(4)]
        await until(lambda: sum(engine.stats()["running"] for engine in engines) == 12)
        asked = [{name.split("/")[0] for name, _, _ in engine.seen} for engine in engines]
        assert len(asked[0]) == len(asked[1]) == 2 and not asked[0] & asked[1]
        for engine in engines:
            engine.release()
        await asyncio.gather(*map(asyncio.wrap_future, calls))


async def test_a_wrong_token_is_said_and_asked_no_engine() -> None:
    engine = scripted(held=False)
    async with lent({"p": [engine]}) as url, a_node(unserved_s=0.3, token="another") as node:
        node.hear(url)
        with pytest.raises(EngineError, match="no node has served it"):
            await node.ask()
        assert engine.stats()["requests"] == 0


async def test_a_policy_that_is_not_there_any_more_is_asked_for_elsewhere() -> None:
    async with lent({"q": [scripted()]}) as url, a_node(unserved_s=0.3) as node:
        node.hear(url)
        with pytest.raises(EngineError, match="no node has served it"):
            await node.ask()


async def test_a_loopback_address_of_another_host_is_somebody_else() -> None:
    engine = scripted(held=False)
    async with lent({"p": [engine]}) as url, a_node(unserved_s=0.2) as node:
        node.hear(url, host="there")
        with pytest.raises(EngineError, match="no node has served it"):
            await node.ask()
        assert engine.stats()["requests"] == 0


def place(host: str = "here", round_trip_s: float = 0.001, running: float = 0.0, waiting: float = 0.0) -> Place:
    made = Place("http://127.0.0.1:1", host, None)
    made.engines = {"p": "local-float32@n"}
    made.saw(Lent({"p": [EngineState(0, 64, running, waiting)]}), round_trip_s)
    return made


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        (place(round_trip_s=0.004, running=9), place("there")),  # the same host, however busy
        (place("there", running=9), place("there", waiting=1)),
        (place("there", 0.02, running=9), place("there", 0.3)),
        (place("there", 0.001, running=1), place("there", 0.004, running=2)),  # too near to each other to tell
    ],
)
def test_who_is_nearer(nearer: Place, farther: Place) -> None:
    assert nearer.cost("p", 0, "here") < farther.cost("p", 0, "here")
