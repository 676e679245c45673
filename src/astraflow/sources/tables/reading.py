"""Rows of files as they are on disk: JSON Lines, JSON, Parquet, Arrow, and directories of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from astraflow.errors import SourceError
from astraflow.sources.files import parse_lines, text_of

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
_NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"})
_LFS = b"version https://git-lfs"
_AGAIN = "it may be cut: copy or download it again"
_CHUNK_ROWS = 1024


class Table:
    """Rows of one file, made when they are asked for where the file is columns."""

    def __init__(self, path: Path, rows: list[dict[str, Any]] | pa.Table, fingerprint: str) -> None:
        self.path, self._rows, self.fingerprint = path, rows, fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if isinstance(self._rows, list):
            return self._rows[index]
        row: dict[str, Any] = self._listed(self._rows.slice(index, 1))[0]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if isinstance(self._rows, list):
            yield from self._rows
            return
        for batch in self._rows.to_batches(max_chunksize=_CHUNK_ROWS):
            yield from self._listed(batch)

    def _listed(self, columns: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
        try:
            rows: list[dict[str, Any]] = columns.to_pylist()
        except UnicodeDecodeError as error:
            raise SourceError("path", str(self.path), f"holds a text that is not UTF-8 ({error})", _AGAIN) from error
        return rows


def files_of(path: Path, split: str) -> list[Path]:
    """The file itself, or those of a directory that belong to `split`, in the order of their names.

    A file belongs to the split that its name begins with (`train-00000-of-00001.parquet`) or that a folder above it has
    as its name. Raises: SourceError: there are none; names the splits that there are.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SourceError("path", str(path), "does not exist", "name a file or directory of this machine")
    found = sorted(file for file in path.rglob("*") if _is_data(file, path))
    if not found:
        kinds = ", ".join(_SUFFIXES)
        raise SourceError("path", str(path), f"holds no file of {kinds}", "name the directory of the data itself")
    splits = {file: _splits(file.relative_to(path)) for file in found}
    if not split:
        known = sorted({name for file in found for name in splits[file] & {"train", "test", "validation"}})
        if len(known) > 1:
            raise SourceError("split", "", f"must be one of {', '.join(known)}", 'give split = "train", say')
        return found
    chosen = [file for file in found if split in splits[file]]
    if not chosen:
        known = sorted(set().union(*splits.values()))
        raise SourceError("split", split, f"is not in {path}", f"it has {', '.join(known)}")
    return chosen


def _is_data(file: Path, top: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(top).parts)
    return not hidden and file.name not in _NOT_DATA and _kind(file) in _SUFFIXES and file.is_file()


def _splits(file: Path) -> set[str]:
    name = re.match(r"[A-Za-z0-9_]+", file.name)
    return {*file.parts[:-1], *([name.group()] if name else [])} - {"data"}


def _kind(file: Path) -> str:
    suffixes = file.suffixes
    return "".join(suffixes[-2:-1] if suffixes and suffixes[-1] in _COMPRESSIONS else suffixes[-1:])


def read(path: Path, columns: Sequence[str] = ()) -> Table:
    """Its rows; of a file of columns only these `columns`, those of them that it has. Raises: SourceError."""
    kind = _kind(path)
    if kind not in _SUFFIXES:
        raise SourceError("path", str(path), f"must end in {', '.join(_SUFFIXES)}", "or in these with .gz, .zst, .bz2")
    fingerprint = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            head = file.read(64)
            file.seek(0)
            while chunk := file.read(1 << 20):
                fingerprint.update(chunk)
    except OSError as error:
        raise SourceError("path", str(path), f"cannot be read ({error.strerror})", "name a file to read") from error
    if head.startswith(_LFS):
        raise SourceError("path", str(path), "is a pointer of Git LFS, not the data", "run `git lfs pull` where it is")
    if kind in (".parquet", ".arrow"):
        rows: Any = _columns(path, kind, columns)
    else:
        rows = _parsed(path, kind, _unpacked(path))
    return Table(path, rows, fingerprint.hexdigest())


def _unpacked(path: Path) -> bytes:
    compression = _COMPRESSIONS.get(path.suffix)
    if compression is None:
        return path.read_bytes()
    try:
        with pa.input_stream(str(path), compression=compression) as stream:
            content: bytes = stream.read()
    except (OSError, EOFError, pa.ArrowException) as error:
        raise SourceError("path", str(path), f"cannot be unpacked ({_first_line(error)})", _AGAIN) from error
    return content


def _parsed(path: Path, kind: str, content: bytes) -> list[dict[str, Any]]:
    if kind != ".json":
        return parse_lines(path, content)
    text = text_of(path, content)
    try:
        whole = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        if text.lstrip().startswith("{") and "\n" in text.strip():
            return parse_lines(path, content)  # JSON Lines by another name
        raise SourceError("path", str(path), f"is not JSON ({error})", _AGAIN) from error
    rows = [whole] if isinstance(whole, dict) else whole
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SourceError("path", str(path), "is not a list of JSON objects", "write [{...}, {...}] or one a line")
    return rows


def _columns(path: Path, kind: str, columns: Sequence[str]) -> pa.Table:
    try:
        if kind == ".parquet":
            known = pq.read_schema(path).names
            return pq.read_table(path, columns=[name for name in columns if name in known] or None, partitioning=None)
        with pa.memory_map(str(path)) as file:
            try:
                table = pa.ipc.open_stream(file).read_all()
            except pa.ArrowInvalid:
                table = pa.ipc.open_file(file).read_all()
    except (OSError, pa.ArrowException) as error:
        what = "Parquet" if kind == ".parquet" else "Arrow"
        raise SourceError("path", str(path), f"cannot be read as {what} ({_first_line(error)})", _AGAIN) from error
    chosen = [name for name in columns if name in table.column_names]
    return table.select(chosen) if chosen else table


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
