"""A retriever as a service: the same answers as in process, batched, bounded, and closed to strangers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import uvloop

from astraflow.errors import Problem, Unauthorized, Unreachable, WireError
from astraflow.retrieval.library import library
from astraflow.retrieval.retriever import Settings, open_retriever
from astraflow.retrieval.serving.batching import Batcher
from astraflow.retrieval.serving.client import RemoteRetriever
from astraflow.retrieval.serving.service import create_retriever_app, run_retriever
from astraflow.wire.app import bind, serve
from small_corpus import write_corpus


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    return open_retriever(Settings(corpus=str(write_corpus(root / "c.jsonl"))), cache_root=root)


@contextmanager
def serving(retriever, token=None, **options) -> Iterator[str]:
    urls: list[str] = []
    ready, loop, stop = threading.Event(), uvloop.new_event_loop(), asyncio.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    async def main() -> None:
        app = create_retriever_app(retriever, token, **options)
        await serve(app, bind("127.0.0.1", 0, "port"), on_ready, stop)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


def post(url, body, **headers):
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    try:
        with urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_service_finds_and_reads_what_the_retriever_does(small):
    queries = ["Who directed Red Harbor?", "zebra", "harbor", ""]
    with serving(small) as url:
        client = RemoteRetriever(url)
        assert client.search(queries, 3) == small.search(queries, 3)
        assert client.search([], 3) == []
        assert client.read(["a", "nobody"]) == small.read(["a", "nobody"])
        client.close()


def test_agents_of_others_need_no_header_of_ours(small):
    document = {
        "id": "a", "title": "Red Harbor", "text": "Red Harbor is a 1950 film directed by Ana Cole.",
        "contents": "Red Harbor\nRed Harbor is a 1950 film directed by Ana Cole.",
    }  # fmt: skip
    with serving(small) as url:
        asked = {"queries": ["red harbor"], "topk": 1}
        assert post(f"{url}/retrieve", asked) == (200, {"result": [[document]]})
        status, scored = post(f"{url}/retrieve", {**asked, "return_scores": True})
        assert status == 200 and scored["result"][0][0]["document"] == document
        assert scored["result"][0][0]["score"] > 0
        for key in ("ids", "urls"):
            assert post(f"{url}/access", {key: ["a", "zz"]}) == (200, {"result": [document, None]})


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/retrieve", {}, 422, "missing required field `queries`"),
        ("/retrieve", {"queries": "text"}, 422, "Expected `array`"),
        ("/retrieve", {"queries": ["x"], "topk": 0}, 422, "topk"),
        ("/retrieve", {"queries": ["x"], "topk": 101}, 422, "topk"),
        ("/retrieve", {"queries": ["x"] * 1025}, 422, "queries"),
        ("/access", {}, 422, "must have ids or urls"),
        ("/access", {"ids": ["a"], "urls": ["a"]}, 422, "must have ids or urls"),
    ],
)
def test_wrong_requests_are_refused_by_name(small, path, body, status, said):
    with serving(small) as url:
        got, answer = post(url + path, body)
        assert got == status and said in answer["error"]


def test_a_web_page_cannot_ask(small):
    with serving(small) as url:
        status, answer = post(f"{url}/retrieve", {"queries": ["x"]}, **{"content-type": "text/plain"})
        assert status == 415 and "content-type" in answer["error"]


def test_a_token_keeps_strangers_out_but_health_answers(small):
    with serving(small, token="secret") as url:
        with pytest.raises(Unauthorized):
            RemoteRetriever(url).search(["red"], 1)
        assert RemoteRetriever(url, "secret").search(["red"], 1)[0][0].passage.id == "a"
        with urlopen(f"{url}/health", timeout=60) as reply:
            assert json.loads(reply.read()) == {"ok": True}


def test_beyond_loopback_there_must_be_a_token(small):
    sock = bind("0.0.0.0", 0, "--port")
    with sock, pytest.raises(Exception, match=r"--host=0\.0\.0\.0 is not loopback and there is no token"):
        run_retriever(small, sock, token=None, on_ready=print)


@pytest.mark.parametrize(("options", "said"), [({"window_s": 2.0}, "--window-ms"), ({"max_batch": 0}, "--max-batch")])
def test_options_are_checked(small, options, said):
    with bind("127.0.0.1", 0, "--port") as sock, pytest.raises(Problem, match=said):
        run_retriever(small, sock, token=None, on_ready=print, **options)


def test_numbers_for_prometheus(small):
    with serving(small) as url:
        RemoteRetriever(url).search(["red harbor", "zebra"], 1)
        RemoteRetriever(url).read(["a", "zz", "b"])
        post(f"{url}/retrieve", {})
        with urlopen(f"{url}/metrics", timeout=60) as reply:
            lines = dict(line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if not line.startswith("#"))
    names = ("passages", "queries_total", "empty_total", "batches_total", "waiting", "reads_total", "missing_total")
    said = [float(lines[f"astraflow_retriever_{name}"]) for name in (*names, "refused_total")]
    assert said == [7, 2, 1, 1, 0, 3, 1, 1]


def test_a_service_that_is_gone_is_named():
    client = RemoteRetriever("http://127.0.0.1:9", timeout_s=1.0, give_up_s=0.1)
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9/retrieve gave no answer"):
        client.search(["x"], 1)
    with pytest.raises(Problem, match="must begin with http"):
        RemoteRetriever("127.0.0.1:9")


def test_a_service_that_never_answers_is_given_up(small):
    let_go = threading.Event()

    class Hung:
        def search(self, queries, topk):
            let_go.wait(60)
            return small.search(queries, topk)

    with serving(Hung()) as url:
        client = RemoteRetriever(url, timeout_s=0.2, give_up_s=0.1)
        with pytest.raises(WireError, match="gave no answer"):
            client.search(["red"], 1)
        let_go.set()


def test_too_many_at_once_are_told_to_come_again(small, monkeypatch):
    monkeypatch.setattr("astraflow.retrieval.serving.service.MAX_WAITING", 2)
    with serving(small) as url:
        status, answer = post(f"{url}/retrieve", {"queries": ["a", "b", "c"]})
        assert status == 503 and "ask again later" in answer["error"]
        assert post(f"{url}/retrieve", {"queries": ["a", "b"]})[0] == 200


async def test_questions_that_come_meanwhile_are_one_batch():
    batches: list[list[int]] = []
    go = threading.Event()

    def answer(questions):
        batches.append(list(questions))
        assert go.wait(60)
        return [question * 10 for question in questions]

    batcher: Batcher[int, int] = Batcher(answer, max_batch=4)
    first = asyncio.create_task(batcher.ask([1]))
    while not batches:
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(batcher.ask([i, i + 1])) for i in (2, 4, 6)]
    await asyncio.sleep(0)
    assert batcher.num_waiting == 6
    go.set()
    assert await first == [10] and await asyncio.gather(*others) == [[20, 30], [40, 50], [60, 70]]
    assert batches == [[1], [2, 3, 4, 5], [6, 7]]


async def test_a_window_gathers_what_comes_within_it():
    batches: list[list[int]] = []

    def answer(questions):
        batches.append(list(questions))
        return list(questions)

    batcher: Batcher[int, int] = Batcher(answer, window_s=0.2)

    async def later(number):
        await asyncio.sleep(0.001 * number)
        return await batcher.ask([number])

    await asyncio.gather(*(later(i) for i in range(10)))
    assert len(batches) == 1


async def test_a_batch_that_fails_fails_those_in_it_and_nobody_else():
    def answer(questions):
        if "bad" in questions:
            raise ValueError("no")
        return questions

    batcher: Batcher[str, str] = Batcher(answer)
    with pytest.raises(ValueError, match="no"):
        await batcher.ask(["bad"])
    assert await batcher.ask(["good"]) == ["good"]


async def test_who_gave_up_is_not_asked_for():
    asked: list[int] = []
    go = threading.Event()

    def answer(questions):
        asked.extend(questions)
        assert go.wait(60)
        return questions

    batcher: Batcher[int, int] = Batcher(answer)
    first = asyncio.create_task(batcher.ask([1]))
    while not asked:
        await asyncio.sleep(0.001)
    second, third = asyncio.create_task(batcher.ask([2])), asyncio.create_task(batcher.ask([3]))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    go.set()
    assert await first == [1] and await third == [3] and asked == [1, 3]


async def test_episodes_share_requests_to_a_service(small):
    with serving(small) as url:
        shelf = library({}, url, "NO_SUCH_VARIABLE", "environment")
        assert library({}, url, "NO_SUCH_VARIABLE", "environment") is shelf
        found = await asyncio.gather(*(shelf.search("harbor", topk) for topk in (1, 2, 3)))
        assert found == [small.search(["harbor"], topk)[0] for topk in (1, 2, 3)]
        read = await shelf.read("b")
        assert read is not None and read.title == "Ana Cole"
    with pytest.raises(Problem, match=r"environment\.index=.* has no effect"):
        library({"corpus": "wiki2hop"}, url, "", "environment")
