"""Files that survive a crash: JSON lines, one write per line, with a reader that passes over a torn one; and texts."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

logger = logging.getLogger(__name__)


class JsonlWriter:
    """Appends rows to one file. Thread-safe; several processes may append to one file, their lines do not mix."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._torn = False
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a crash tore the last line: the next one must not be glued to it

    def append(self, row: Mapping[str, Any] | msgspec.Struct) -> None:
        """Write one line. NaN and infinities become null; numpy scalars and arrays are taken as numbers and lists; half
        characters, which no encoding has, are written as escapes.

        Raises: OSError: the disk is full; a piece of the line may be there, and the next one is not glued to it.
        """
        try:
            line = memoryview(msgspec.json.encode(row, enc_hook=_plain) + b"\n")
        except UnicodeEncodeError:
            line = memoryview(msgspec.json.encode(_whole(msgspec.to_builtins(row, enc_hook=_plain))) + b"\n")
        with self._lock:
            if self._torn:
                os.write(self._fd, b"\n")
                self._torn = False
            while line:  # a short write happens only on a disk that is nearly full; the next one raises
                written = os.write(self._fd, line)
                line = line[written:]
                self._torn = bool(line)

    def close(self) -> None:
        """Close the file; appending afterwards is an error."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a file, oldest first; torn lines are passed over with a warning. No file: no rows."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return _decode(content, path)


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: after a kill, a power failure or a full disk it holds the old text or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


class JsonlTail:
    """The rows that were added to a file since the last look. `offset`: bytes of it that were looked at."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self.offset = offset

    def new_rows(self) -> list[dict[str, Any]]:
        """Whole new rows, oldest first; a line that is still being written comes the next time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        return _decode(whole, self._path)


def _decode(content: bytes, path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    num_torn = 0
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError:
            num_torn += 1
    if num_torn:
        logger.warning("%s: passed over %d torn lines", path, num_torn)
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be written as JSON")


def _whole(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_whole(key): _whole(item) for key, item in value.items()}
        case list() | tuple():
            return [_whole(item) for item in value]
    return value
