"""The client of `astraflow retriever`: the same two verbs as a `Retriever`, over HTTP, with a deadline and retries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from astraflow.errors import Problem
from astraflow.retrieval.corpus import Passage
from astraflow.retrieval.retriever import MAX_QUERIES, MAX_TOPK, Hit
from astraflow.wire.client import HttpClient


class Ask(msgspec.Struct):
    """Body of POST /retrieve."""

    queries: Annotated[list[str], msgspec.Meta(max_length=MAX_QUERIES)]
    topk: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOPK)] = 5
    return_scores: bool = False


class Access(msgspec.Struct):
    """Body of POST /access: one of both."""

    ids: Annotated[list[str], msgspec.Meta(max_length=MAX_QUERIES)] | None = None
    urls: Annotated[list[str], msgspec.Meta(max_length=MAX_QUERIES)] | None = None


class _Scored(msgspec.Struct):
    document: Passage
    score: float


class _Found(msgspec.Struct):
    result: list[list[_Scored]]


class _Read(msgspec.Struct):
    result: list[Passage | None]


class RemoteRetriever:
    """Blocks; use from several threads. What cannot be reached is asked again until `give_up_s` have passed."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 20.0, give_up_s: float = 10.0) -> None:
        """`timeout_s`: of one request. Raises: Problem: no URL."""
        if not url.startswith(("http://", "https://")):
            raise Problem(
                "retriever url", url, "must begin with http:// or https://", "give what `astraflow retriever` said"
            )
        self._client = HttpClient(url, token, timeout_s=timeout_s, give_up_s=give_up_s)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Raises: WireError: refused, or no answer in time."""
        found: list[list[Hit]] = []
        for begin in range(0, len(queries), MAX_QUERIES):
            asked = Ask(list(queries[begin : begin + MAX_QUERIES]), topk, return_scores=True)
            reply = self._client.json("POST", "/retrieve", asked, _Found)
            found += [[Hit(hit.document, hit.score) for hit in hits] for hits in reply.result]
        return found

    def read(self, ids: Sequence[str]) -> list[Passage | None]:
        """Raises: WireError: refused, or no answer in time."""
        read: list[Passage | None] = []
        for begin in range(0, len(ids), MAX_QUERIES):
            read += self._client.json(
                "POST", "/access", Access(ids=list(ids[begin : begin + MAX_QUERIES])), _Read
            ).result
        return read

    def close(self) -> None:
        """Drop connections."""
        self._client.close()
