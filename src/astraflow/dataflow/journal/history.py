"""The lives of tasks, beside the journal: what `astraflow trace` prints. Append-only files, the oldest are deleted.

A line is `[command, run time, task, what, fields]`. Lines follow from commands: those of commands that a start replays
are cut off and written again by the replay, so a kill loses none and doubles none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

log = logging.getLogger("astraflow.dataflow")
HISTORY_BYTES = 64 << 20
_FILES = 16  # that many make up the whole; one at a time is deleted
_encode, _encode_lines = msgspec.json.Encoder().encode, msgspec.json.Encoder().encode_lines


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to one task."""

    seq: int  # command that did it
    now: float  # run time, seconds
    task: str  # group id
    what: str
    fields: dict[str, Any]


class Life(NamedTuple):
    """What is known of one task, and from which run time on history is kept (0: all of it)."""

    moments: list[Moment]
    begins_s: float


class History:
    """The writer. `keep_to`: lines of later commands are cut off, since they will be written again.

    A full disk ends nothing: lines that cannot be written are dropped and counted.
    """

    def __init__(self, directory: Path, keep_to: int, limit_bytes: int = HISTORY_BYTES) -> None:
        directory.mkdir(exist_ok=True)
        self._directory, self._file_bytes = directory, max(1, limit_bytes // _FILES)
        self.num_dropped = 0
        self._waiting: list[tuple[int, float, str, str, dict[str, Any]]] = []
        self._cut(keep_to)
        numbers = _numbers(directory)
        self._number = numbers[-1] if numbers else 1
        self._file = self._open()

    def add(self, seq: int, now: float, moments: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
        """What command `seq` did to tasks: (task, what, fields)."""
        now = round(now, 3)
        try:
            self._waiting += [(seq, now, *moment) for moment in moments]
        except Exception as error:  # the command is applied; that it cannot be told must stop no run and no restart
            log.error("history: what command %d did cannot be told", seq, exc_info=error)
            self.num_dropped += 1

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        content, count = _encode_lines(self._waiting), len(self._waiting)
        self._waiting.clear()
        size = os.fstat(self._file).st_size
        try:
            if size and size + len(content) > self._file_bytes:
                self._roll()
                size = 0
            _write_all(self._file, content)
        except OSError as error:
            if not self.num_dropped:
                log.error("history=%s cannot be written (%s); its lines are dropped", self._directory, error.strerror)
            self.num_dropped += count
            with suppress(OSError):
                os.ftruncate(self._file, size)

    def close(self) -> None:
        """Write what waits and close the file."""
        self.flush()
        os.close(self._file)

    def _roll(self) -> None:
        self._number += 1
        file = self._open()
        os.close(self._file)
        self._file = file
        for number in _numbers(self._directory)[:-_FILES]:
            _path(self._directory, number).unlink(missing_ok=True)

    def _open(self) -> int:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        return os.open(_path(self._directory, self._number), flags, 0o644)

    def _cut(self, keep_to: int) -> None:
        for number in reversed(_numbers(self._directory)):
            path = _path(self._directory, number)
            content = path.read_bytes()
            end = content.rfind(b"\n") + 1
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                if _seq_of(content[start:end]) <= keep_to:
                    break
                end = start
            if end or number == 1:
                os.truncate(path, end)
                return
            path.unlink()


def read_life(directory: Path, task: str) -> Life:
    """Everything kept of `task`, also while a service writes."""
    moments: list[Moment] = []
    numbers = _numbers(directory)
    begins_s = 0.0
    if numbers and numbers[0] > 1:
        begins_s = next((m.now for m in _lines(directory, numbers[0], b"")), 0.0)
    needle = _encode(task)
    for number in numbers:
        moments += [moment for moment in _lines(directory, number, needle) if moment.task == task]
    return Life(moments, begins_s)


def read_lives(directory: Path) -> dict[str, list[Moment]]:
    """Everything kept of every task, in the order of their first moments."""
    lives: dict[str, list[Moment]] = {}
    for number in _numbers(directory):
        for moment in _lines(directory, number, b""):
            lives.setdefault(moment.task, []).append(moment)
    return lives


def _lines(directory: Path, number: int, needle: bytes) -> Iterator[Moment]:
    try:
        content = _path(directory, number).read_bytes()
    except FileNotFoundError:  # the service has just deleted it
        return
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        if needle in line:
            yield msgspec.json.decode(line, type=Moment)


def _seq_of(line: bytes) -> int:
    try:
        return msgspec.json.decode(line, type=Moment).seq
    except msgspec.DecodeError:
        return 1 << 62  # torn or damaged: cut it


def _numbers(directory: Path) -> list[int]:
    return sorted(int(p.stem) for p in directory.glob("*.jsonl") if p.stem.isdecimal())


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}.jsonl"


def _write_all(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
