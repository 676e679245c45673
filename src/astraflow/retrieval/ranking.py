"""Rankings of rows: by words (BM25), by vectors, or by both. Equal scores are in the order of the corpus."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from astraflow.errors import Problem, SourceError
from astraflow.retrieval.store import Stored

Ranking = list[tuple[int, float]]
"""(row, score), best first."""
Encoder = Callable[[Sequence[str]], Any]
"""Texts -> [len(texts), D] vectors of the kind that the passages have."""

MAX_WORDS, MAX_CHARS = 64, 4096  # of a query; what is beyond is not read
RRF_K = 60
FUSED_DEPTH = 100  # of each ranking; fixed, so that an answer does not depend on how many passages were asked for
_WORD = re.compile(r"[^\W_]+")
_DIGITS = 4  # two scores that differ by less are equal: sums of float32 in another order are not
_ROWS_AT_ONCE = 1 << 16


class Ranker(Protocol):
    """Ranks the rows of a corpus."""

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """The best rows of each query; fewer than `topk` when fewer match."""


def clean(query: str) -> str:
    """The distinct words of a query, in lower case: nothing that a query language could mean."""
    return " ".join(list(dict.fromkeys(_WORD.findall(query[:MAX_CHARS].lower())))[:MAX_WORDS])


class ByWords:
    """BM25 (k1 1.2, b 0.75) over the words of title and text."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        return [self._rank(clean(query), topk) for query in queries]

    def _rank(self, words: str, topk: int) -> Ranking:
        if not words:
            return []
        parsed, limit = self._stored.index.parse_query(words, ["words"]), topk + 1
        while True:  # until what is cut off is worse than what is kept, so that ties do not depend on tantivy
            hits = self._stored.searcher.search(parsed, limit, count=False).hits
            scores = [round(score, _DIGITS) for score, _ in hits]
            if len(hits) < limit or scores[-1] < scores[topk - 1]:
                break
            limit *= 4
        rows = self._stored.rows([address for _, address in hits])
        return sorted(zip(rows, scores, strict=True), key=lambda found: (-found[1], found[0]))[:topk]


class ByVectors:
    """Inner product with the vector of each passage: exact, over all of them."""

    def __init__(self, path: Path, encoder: Encoder, num_passages: int) -> None:
        """`path`: .npy of [N, D] float16 or float32, in the order of the corpus.

        Raises: SourceError: it does not fit.
        """
        try:
            self._vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise SourceError(
                "vectors", str(path), f"cannot be read ({error})", "save a .npy of [N, D] floats"
            ) from error
        if self._vectors.ndim != 2 or self._vectors.dtype not in (np.float16, np.float32):
            got = f"{self._vectors.dtype} {list(self._vectors.shape)}"
            raise SourceError("vectors", str(path), f"holds {got}", "save [N, D] of float16 or float32")
        if len(self._vectors) != num_passages:
            raise SourceError(
                "vectors", str(path), f"holds {len(self._vectors)} rows for {num_passages} passages",
                "encode every passage of the corpus, in its order",
            )  # fmt: skip
        self._encoder = encoder

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        if not queries:
            return []
        asked = np.asarray(self._encoder(list(queries)), np.float32)
        wanted = (len(queries), self._vectors.shape[1])
        if asked.shape != wanted:
            raise Problem(
                "encoder", list(asked.shape), f"must give vectors of shape {list(wanted)}", "use the passages' own"
            )
        best: list[Ranking] = [[] for _ in queries]
        for begin in range(0, len(self._vectors), _ROWS_AT_ONCE):
            block = np.asarray(self._vectors[begin : begin + _ROWS_AT_ONCE], np.float32)
            for number, scores in enumerate(np.round(asked @ block.T, _DIGITS)):
                best[number] = _best(best[number] + _candidates(scores, begin, topk), topk)
        return best


class ByBoth:
    """Reciprocal rank fusion: the sum of 1 / (60 + rank) over both rankings (Cormack et al., SIGIR 2009)."""

    def __init__(self, rankers: Sequence[Ranker]) -> None:
        self._rankers = rankers

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        every = [ranker.rank(queries, FUSED_DEPTH) for ranker in self._rankers]
        return [_fused(rankings, topk) for rankings in zip(*every, strict=True)]


def _fused(rankings: Sequence[Ranking], topk: int) -> Ranking:
    sums: dict[int, float] = {}
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            sums[row] = sums.get(row, 0.0) + 1 / (RRF_K + rank)
    return _best(list(sums.items()), topk)


def _candidates(scores: np.ndarray, begin: int, topk: int) -> Ranking:
    """All rows that are no worse than the `topk`-th of `scores`."""
    if len(scores) > topk:
        rows = np.flatnonzero(scores >= np.partition(scores, -topk)[-topk])
    else:
        rows = np.arange(len(scores))
    return [(begin + row, score) for row, score in zip(rows.tolist(), scores[rows].tolist(), strict=True)]


def _best(ranking: Ranking, topk: int) -> Ranking:
    return sorted(ranking, key=lambda found: (-found[1], found[0]))[:topk]
