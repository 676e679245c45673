"""Search in a corpus, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from astraflow.config.env import cache_dir, user_path
from astraflow.config.rooms import choose
from astraflow.errors import Problem
from astraflow.retrieval.corpus import Fields, Passage, corpus_path
from astraflow.retrieval.ranking import ByBoth, ByVectors, ByWords, Ranker
from astraflow.retrieval.store import Stored, open_index

Mode = Literal["words", "vectors", "both"]
MAX_TOPK, MAX_QUERIES = 100, 1024


class Hit(msgspec.Struct, frozen=True):
    """A passage that was found."""

    passage: Passage
    score: float  # of its ranking; comparable within one answer only


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to search and how."""

    corpus: str = "wiki2hop"  # that ships, or a JSON Lines file, perhaps .gz
    fields: Fields = Fields()
    vectors: str = ""  # .npy of one vector per passage; "": search by words alone
    encoder: str | dict[str, Any] = ""  # of queries: `module:Object`, or {type = ..., option = ...}
    mode: Mode | None = None  # None: both where there are vectors, else words


def settings_of(given: Mapping[str, Any], where: str) -> Settings:
    """Raises: Problem: an unknown setting, one of the wrong type, or some that contradict each other."""
    try:
        settings = msgspec.convert(dict(given), Settings)
    except msgspec.ValidationError as error:
        names = ", ".join(Settings.__struct_fields__)
        raise Problem(where, dict(given), f"is not what it must be ({error})", f"settings: {names}") from error
    if bool(settings.vectors) != bool(settings.encoder):
        raise Problem(
            f"{where}.encoder", settings.encoder, "goes with vectors, and they with it", "give both, or leave both out"
        )
    if settings.mode not in (None, "words") and not settings.vectors:
        raise Problem(f"{where}.mode", settings.mode, "needs vectors", f"give {where}.vectors, or use mode = 'words'")
    return settings


class Retriever:
    """A corpus that can be searched and read. Use from several threads."""

    def __init__(self, stored: Stored, ranker: Ranker) -> None:
        self._stored, self._ranker = stored, ranker

    def __len__(self) -> int:
        return len(self._stored)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages of each query, best first; none where no word of it occurs."""
        rankings = self._ranker.rank(queries, topk)
        return [[Hit(self._stored.passage(row), score) for row, score in ranking] for ranking in rankings]

    def read(self, ids: Sequence[str]) -> list[Passage | None]:
        """The passages of these ids; None: there is none."""
        return [self._stored.by_id(name) for name in ids]


def open_retriever(settings: Settings, where: str = "search", cache_root: Path | None = None) -> Retriever:
    """Opens the index, which is made first if nobody has.

    Raises: SourceError: the corpus or the vectors are malformed. Problem: a package is missing, or the encoder.
    """
    directory = (cache_dir() if cache_root is None else cache_root) / "search"
    stored = open_index(corpus_path(settings.corpus), settings.fields, directory)
    words = ByWords(stored)
    mode = settings.mode or ("both" if settings.vectors else "words")
    if mode == "words":
        return Retriever(stored, words)
    encoder = choose("encoders", settings.encoder, f"{where}.encoder").make()
    vectors = ByVectors(user_path(settings.vectors), encoder, len(stored))
    return Retriever(stored, vectors if mode == "vectors" else ByBoth([words, vectors]))
