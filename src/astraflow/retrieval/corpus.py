"""Passages from a JSON Lines file, perhaps packed by gzip. What is wrong with it is said with file, row and key."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash

from astraflow.config.env import user_path
from astraflow.errors import SourceError

SHIPPED = ("wiki2hop",)
MAX_ID_CHARS = 1000
_CHUNK = 1 << 20


class Passage(msgspec.Struct, frozen=True):
    """One piece of text that can be found and read."""

    id: str  # unique in its corpus; perhaps a URL
    title: str  # may be empty
    text: str


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of the keys that hold what a passage is made of."""

    id: str = "id"
    title: str = "title"  # "": there is none
    text: str = "text"


def corpus_path(name: str) -> Path:
    """Where a corpus lies: a file, or one that comes with the package. Raises: SourceError: no such file."""
    if name in SHIPPED:
        with as_file(files("astraflow.retrieval") / "data" / name / "corpus.jsonl.gz") as shipped:
            return shipped
    path = user_path(name)
    if not path.is_file():
        raise SourceError(
            "corpus", name, "is neither a file nor a corpus that ships",
            f"name a JSON Lines file, or one of: {', '.join(SHIPPED)}",
        )  # fmt: skip
    return path


def content_hash(path: Path) -> str:
    """xxh3-128 of the bytes of the file."""
    state = xxhash.xxh3_128()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                state.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    return state.hexdigest()


def read_corpus(path: Path, fields: Fields) -> Iterator[Passage]:
    """All passages, in the order of the file. Rows are counted from 0, lines from 1.

    Raises: SourceError: names file, row and key; also, after the last row, when two rows have one id.
    """
    hashes: list[np.ndarray] = []
    block: list[int] = []
    row = 0
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        passage = _passage(path, number, row, line.strip(), fields)
        row += 1
        block.append(xxhash.xxh3_64_intdigest(passage.id.encode()))
        if len(block) == _CHUNK:
            hashes.append(np.array(block, np.uint64))
            block = []
        yield passage
    if not row:
        raise SourceError(
            "corpus", str(path), "holds no row", 'write {"id": ..., "title": ..., "text": ...} on each line'
        )
    _check_unique(path, np.concatenate([*hashes, np.array(block, np.uint64)]), fields)


def _lines(path: Path) -> Iterator[bytes]:
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                yield line[3:] if number == 1 and line.startswith(b"\xef\xbb\xbf") else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(
            f"{path}:{number + 1}", str(error), "cannot be unpacked; the file was cut or damaged", "copy it again"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError("corpus", str(path), f"cannot be read ({error.strerror})", "name a JSON Lines file")


def _passage(path: Path, number: int, row: int, line: bytes, fields: Fields) -> Passage:
    try:
        found = msgspec.json.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}:{number}", error.reason, "is not UTF-8", "save the file as UTF-8") from error
    except (msgspec.DecodeError, RecursionError) as error:
        text = line.decode("utf-8")
        raise SourceError(f"{path}:{number}", text, f"is not JSON ({error})", "write one JSON object a line") from error
    if not isinstance(found, dict):
        raise SourceError(f"{path}:{number}", str(found), "is not a JSON object", 'write {"id": ..., "text": ...}')
    where = f"{path} row {row}"
    name = found.get(fields.id)
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    title = _text(where, fields.title, found.get(fields.title, ""), may_be_empty=True) if fields.title else ""
    passage = Passage(_text(where, fields.id, name), title, _text(where, fields.text, found.get(fields.text)))
    if len(passage.id) > MAX_ID_CHARS:
        raise SourceError(
            f"{where}: {fields.id}", passage.id, f"has over {MAX_ID_CHARS} characters", "use a shorter one"
        )
    return passage


def _text(where: str, key: str, value: object, *, may_be_empty: bool = False) -> str:
    if value is None:
        raise SourceError(f"{where}: {key}", None, "is missing", "every row needs this key; see `fields`")
    if not isinstance(value, str):
        raise SourceError(f"{where}: {key}", value, "is not a text", "write it in quotation marks")
    if not may_be_empty and not value.strip():
        raise SourceError(f"{where}: {key}", value, "is empty", "fill it in or remove the row")
    return value


def _check_unique(path: Path, hashes: np.ndarray, fields: Fields) -> None:
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    if len(same):
        first, second = sorted(int(row) for row in order[same[0] : same[0] + 2])
        raise SourceError(
            f"{path} row {second}: {fields.id}",
            None,
            f"is that of row {first} too",
            "give each passage an id of its own",
        )
