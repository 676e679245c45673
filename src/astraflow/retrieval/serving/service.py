"""One corpus for many processes: `astraflow retriever`.

| request         | body                                         | answer                                            |
|-----------------|----------------------------------------------|---------------------------------------------------|
| POST /retrieve  | `{queries, topk, return_scores}`             | `{result: [[document, ...], ...]}`, one list each |
| POST /access    | `{ids}` or `{urls}`                          | `{result: [document or null, ...]}`               |
| GET /health     |                                              | `{ok: true}`; needs no token                      |
| GET /metrics    |                                              | for Prometheus                                    |

A document is `{id, title, text, contents}`, where contents are title and text; with `return_scores` it stands in
`{document, score}`. The forms follow the retrieval servers of Search-R1 and ASearcher; no header of ours is needed.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.errors import Problem
from astraflow.observe.metrics import CONTENT_TYPE, MetricsRegistry
from astraflow.retrieval.corpus import Passage
from astraflow.retrieval.retriever import Hit, Retriever
from astraflow.retrieval.serving.batching import Batcher, search_each
from astraflow.retrieval.serving.client import Access, Ask
from astraflow.wire.app import HttpError, check_bind, create_app, json_reply, read_json, serve

MAX_BODY_BYTES = 8 << 20
MAX_WAITING = 16_384  # queries; more are told to come again


@dataclass
class Counts:
    """Since the service started."""

    queries: int = 0
    empty: int = 0  # queries that found nothing
    reads: int = 0
    missing: int = 0  # reads of ids that there are not
    refused: int = 0
    batches: Batcher[tuple[str, int], list[Hit]] = field(init=False)


def create_retriever_app(
    retriever: Retriever, token: str | None, *, window_s: float = 0.0, max_batch: int = 256
) -> Starlette:
    """The app around an opened retriever."""
    counts = Counts()
    counts.batches = Batcher(partial(search_each, retriever), window_s=window_s, max_batch=max_batch)

    async def retrieve(request: Request) -> Response:
        asked = await read_json(request, Ask)
        if counts.batches.num_waiting + len(asked.queries) > MAX_WAITING:
            raise HttpError(503, f"queries={MAX_WAITING} wait already; ask again later", pause_s=1)
        counts.queries += len(asked.queries)
        found = await counts.batches.ask([(query, asked.topk) for query in asked.queries])
        counts.empty += sum(not hits for hits in found)
        told = _scored if asked.return_scores else _plain
        return json_reply({"result": [[told(hit) for hit in hits] for hits in found]})

    async def access(request: Request) -> Response:
        asked = await read_json(request, Access)
        if (asked.ids is None) == (asked.urls is None):
            raise HttpError(422, "body=access must have ids or urls; give one of them")
        names = asked.ids if asked.ids is not None else asked.urls or []
        passages = retriever.read(names)
        counts.reads += len(passages)
        counts.missing += passages.count(None)
        return json_reply({"result": [None if passage is None else document(passage) for passage in passages]})

    async def metrics(request: Request) -> Response:
        return Response(_metrics(counts, len(retriever)).prometheus_text(), media_type=CONTENT_TYPE)

    def on_refused(error: Exception) -> None:
        counts.refused += 1

    routes = [
        Route("/retrieve", retrieve, methods=["POST"]),
        Route("/access", access, methods=["POST"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    return create_app(routes, token=token, max_body_bytes=MAX_BODY_BYTES, on_refused=on_refused, bare=True)


def document(passage: Passage) -> dict[str, str]:
    """As it travels."""
    contents = f"{passage.title}\n{passage.text}" if passage.title else passage.text
    return {"id": passage.id, "title": passage.title, "text": passage.text, "contents": contents}


def _plain(hit: Hit) -> dict[str, Any]:
    return document(hit.passage)


def _scored(hit: Hit) -> dict[str, Any]:
    return {"document": document(hit.passage), "score": hit.score}


def _metrics(counts: Counts, num_passages: int) -> MetricsRegistry:
    registry = MetricsRegistry()
    registry.set("astraflow_retriever_passages", num_passages)
    registry.set("astraflow_retriever_queries_total", counts.queries)
    registry.set("astraflow_retriever_empty_total", counts.empty)
    registry.set("astraflow_retriever_batches_total", counts.batches.num_batches)
    registry.set("astraflow_retriever_waiting", counts.batches.num_waiting)
    registry.set("astraflow_retriever_reads_total", counts.reads)
    registry.set("astraflow_retriever_missing_total", counts.missing)
    registry.set("astraflow_retriever_refused_total", counts.refused)
    return registry


def run_retriever(
    retriever: Retriever, sock: socket.socket, *, token: str | None, on_ready: Callable[[str], None],
    window_s: float = 0.0, max_batch: int = 256,
) -> None:  # fmt: skip
    """The process of `astraflow retriever`: serves on a socket from `wire.app.bind` until SIGTERM or SIGINT.

    Raises: LaunchError: beyond loopback without a token. Problem: a window or a batch that cannot be.
    """
    import uvloop

    check_bind(sock.getsockname()[0], token, "--host")
    if not 0 <= window_s <= 1:
        raise Problem("--window-ms", window_s * 1e3, "must be in 0..1000", "use 0 to answer at once")
    if max_batch < 1:
        raise Problem("--max-batch", max_batch, "must be >= 1", "use 256")

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        app = create_retriever_app(retriever, token, window_s=window_s, max_batch=max_batch)
        await serve(app, sock, on_ready, stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
