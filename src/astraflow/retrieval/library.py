"""Where the episodes of one process search: an index here, or a service elsewhere. Made once with each settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import msgspec

from astraflow.config.env import secret_from_env
from astraflow.errors import Problem
from astraflow.retrieval.corpus import Passage
from astraflow.retrieval.retriever import Hit, Retriever, Settings, open_retriever, settings_of
from astraflow.retrieval.serving.batching import Batcher, search_each
from astraflow.retrieval.serving.client import RemoteRetriever


class Library:
    """Search and read from coroutines. Words in an index here take 0.2 ms and are done at once; all else is done in a
    thread, where the searches of concurrent episodes travel together."""

    def __init__(self, retriever: Retriever | RemoteRetriever, *, at_once: bool) -> None:
        self._retriever, self._at_once = retriever, at_once
        self._searches: Batcher[tuple[str, int], list[Hit]] = Batcher(partial(search_each, retriever))
        self._reads: Batcher[str, Passage | None] = Batcher(retriever.read)

    async def search(self, query: str, topk: int) -> list[Hit]:
        """The best passages, best first."""
        if self._at_once:
            return self._retriever.search([query], topk)[0]
        return (await self._searches.ask([(query, topk)]))[0]

    async def read(self, name: str) -> Passage | None:
        """The passage of this id; None: there is none."""
        if self._at_once:
            return self._retriever.read([name])[0]
        return (await self._reads.ask([name]))[0]


def library(index: Mapping[str, Any], url: str, key_env: str, where: str) -> Library:
    """`url`: of `astraflow retriever`, asked with the token in the variable `key_env`; "": `index` is opened here.

    Raises: Problem: a setting that cannot work, a package or a file that is missing. SourceError: a malformed corpus.
    """
    if url and index:
        raise Problem(
            f"{where}.index", dict(index), "has no effect: the service has its own", f"give it or {where}.url"
        )
    return _kept(msgspec.json.encode(settings_of(index, f"{where}.index")), url, key_env, where)


@cache
def _kept(settings: bytes, url: str, key_env: str, where: str) -> Library:
    if url:
        return Library(RemoteRetriever(url, secret_from_env(key_env)), at_once=False)
    wanted = msgspec.json.decode(settings, type=Settings)
    return Library(open_retriever(wanted, f"{where}.index"), at_once=not wanted.vectors)
