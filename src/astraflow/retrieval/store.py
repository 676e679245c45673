"""The index of a corpus on disk: made once, named by what it was made from, mapped by every process that uses it.

| file         | holds                                                        |
|--------------|--------------------------------------------------------------|
| passages.bin | each passage as JSON, one after the other                    |
| offsets.npy  | [N + 1] uint64: where they begin                             |
| words/       | tantivy: words of title and text; id; the row as a fast field |
| facts.json   | `Facts`, written last                                        |
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from astraflow.config.rooms import required
from astraflow.errors import Problem
from astraflow.retrieval.corpus import Fields, Passage, content_hash, read_corpus

log = logging.getLogger("astraflow.retrieval")
FORMAT = 1  # raised when what is written changes
ANALYZER = "words"
_HEAP_BYTES = 128_000_000  # of words in memory while the index is made
_TOLD_EVERY = 500_000


class Facts(msgspec.Struct, frozen=True):
    """What a finished index says of itself."""

    format: int
    corpus: str  # xxh3-128 of the file
    num_passages: int


class Stored:
    """An opened index."""

    def __init__(self, directory: Path, facts: Facts) -> None:
        """Raises: Problem: parts are missing or do not fit each other."""
        self.directory, self.facts = directory, facts
        self._tantivy = tantivy = required("tantivy", "search")
        try:
            self._offsets = np.load(directory / "offsets.npy", mmap_mode="r")
            with open(directory / "passages.bin", "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.index = tantivy.Index.open(str(directory / "words"))
            register_analyzer(tantivy, self.index)
            self.searcher = self.index.searcher()
        except (OSError, ValueError) as error:
            raise _damaged(directory, str(error)) from error
        count = facts.num_passages
        if len(self._offsets) != count + 1 or self.searcher.num_docs != count or self._offsets[-1] != len(self._bytes):
            raise _damaged(directory, "its parts are of different sizes")

    def __len__(self) -> int:
        return self.facts.num_passages

    def passage(self, row: int) -> Passage:
        """Of this row of the corpus."""
        begin, end = self._offsets[row : row + 2].tolist()
        return msgspec.json.decode(self._bytes[begin:end], type=Passage)

    def by_id(self, name: str) -> Passage | None:
        """The passage of this id, or None."""
        query = self._tantivy.Query.term_query(self.index.schema, "id", name, "basic")
        hits = self.searcher.search(query, 1, count=False).hits
        return self.passage(self.rows([hits[0][1]])[0]) if hits else None

    def rows(self, addresses: Sequence[Any]) -> list[int]:
        """Rows of what the searcher found."""
        return list(self.searcher.fast_field_values("row", list(addresses)))


def open_index(path: Path, fields: Fields, cache: Path) -> Stored:
    """The index of a corpus, made first if nobody has. Safe from many processes at once: one makes it, the others wait.

    Raises: SourceError: the file is malformed. Problem: tantivy is missing, the cache cannot be written or is damaged.
    """
    version = required("tantivy", "search").__version__  # names its index format too
    try:
        corpus = _known_hash(path, cache)
        key = xxhash.xxh3_64_hexdigest(msgspec.json.encode([FORMAT, version, corpus, fields]))
        target = cache / key
        if not (target / "facts.json").is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            # The lock is the kernel's: it ends with its holder, so a process that dies while writing blocks nobody.
            with open(cache / f"{key}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (target / "facts.json").is_file():
                    _make(target, path, fields, corpus)
    except OSError as error:
        raise Problem(
            "search index",
            str(cache),
            f"cannot be written ({error})",
            "free some space, or set ASTRAFLOW_CACHE elsewhere",
        ) from error
    return Stored(target, _facts(target))


def _known_hash(path: Path, cache: Path) -> str:
    """Of the file's content; a file of the same place, size and time is not read again."""
    found = path.stat()
    mark = xxhash.xxh3_64_hexdigest(repr((str(path.resolve()), found.st_size, found.st_mtime_ns)).encode())
    note = cache / "corpora" / mark
    if note.is_file() and len(known := note.read_text()) == 32:
        return known
    known = content_hash(path)
    note.parent.mkdir(parents=True, exist_ok=True)
    partial = note.with_name(f"{mark}.{time.monotonic_ns()}")
    partial.write_text(known)
    partial.rename(note)
    return known


def _facts(directory: Path) -> Facts:
    try:
        return msgspec.json.decode((directory / "facts.json").read_bytes(), type=Facts)
    except msgspec.DecodeError as error:
        raise _damaged(directory, str(error)) from error


def _damaged(directory: Path, why: str) -> Problem:
    return Problem("search index", str(directory), f"is damaged ({why})", "remove that directory; it is made again")


def _make(target: Path, path: Path, fields: Fields, corpus: str) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that died; the lock says nobody writes it now
    (partial / "words").mkdir(parents=True)
    began = time.monotonic()
    try:
        count = _write(partial, path, fields)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    (partial / "facts.json").write_bytes(msgspec.json.encode(Facts(FORMAT, corpus, count)))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    log.info("indexed %d passages of %s in %.1f s", count, path, time.monotonic() - began)


def _write(directory: Path, path: Path, fields: Fields) -> int:
    tantivy = required("tantivy", "search")
    schema = tantivy.SchemaBuilder()
    schema.add_text_field("words", tokenizer_name=ANALYZER, index_option="freq")
    schema.add_text_field("id", tokenizer_name="raw", index_option="basic")
    schema.add_unsigned_field("row", fast=True)
    index = tantivy.Index(schema.build(), path=str(directory / "words"))
    register_analyzer(tantivy, index)
    offsets = [0]
    # One thread: the same corpus gives the same segments, and so the same scores to the last bit.
    with open(directory / "passages.bin", "wb") as packed, index.writer(_HEAP_BYTES, 1) as writer:
        for row, passage in enumerate(read_corpus(path, fields)):
            offsets.append(offsets[-1] + packed.write(msgspec.json.encode(passage)))
            document = tantivy.Document()
            document.add_text("words", f"{passage.title}. {passage.text}")
            document.add_text("id", passage.id)
            document.add_unsigned("row", row)
            writer.add_document(document)
            if (row + 1) % _TOLD_EVERY == 0:
                log.info("indexed %d passages of %s", row + 1, path)
    np.save(directory / "offsets.npy", np.array(offsets, np.uint64))
    return len(offsets) - 1


def register_analyzer(tantivy: Any, index: Any) -> None:
    """Words of letters and digits, in lower case and without accents."""
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for change in (tantivy.Filter.remove_long(64), tantivy.Filter.lowercase(), tantivy.Filter.ascii_fold()):
        builder = builder.filter(change)
    index.register_tokenizer(ANALYZER, builder.build())
