"""The directory of an evaluation: what it is of, and every episode that has ended. The same evaluation goes on in it.

settings.json    what decides what is played; another value is refused by name
episodes.jsonl   one row per episode, written when it ends: what is there is not played again
results.json     the numbers, when all was played
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from astraflow.errors import ConfigError, LaunchError
from astraflow.observe.jsonl import JsonlWriter, read_jsonl, write_whole

FORMAT = 1
Key = tuple[str, str, int, int]
"""Side, source, row, sample."""


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One episode as it is kept."""

    side: str
    source: str
    row: int
    sample: int
    success: float | None  # None: unscored
    reward: float | None  # None: unscored
    error: str | None = None
    metrics: dict[str, float] = {}
    num_tokens: int = 0  # sampled
    wall_s: float = 0.0
    code: str = ""  # version of the workflow's code

    @property
    def key(self) -> Key:
        return self.side, self.source, self.row, self.sample


class Journal:
    """Of an evaluation that is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[Key, EpisodeRow] = {}
        for raw in read_jsonl(path / "episodes.jsonl"):
            row = msgspec.convert(raw, EpisodeRow)
            self._rows.setdefault(row.key, row)
        self._file = JsonlWriter(path / "episodes.jsonl")

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def add(self, row: EpisodeRow) -> None:
        """Keep an episode; a second one of the same key changes nothing.

        Raises: OSError: the disk is full.
        """
        if row.key not in self._rows:
            self._file.append(row)
            self._rows[row.key] = row

    def rows(self, side: str) -> list[EpisodeRow]:
        """Of one side, in the order of tasks."""
        return sorted((row for row in self._rows.values() if row.side == side), key=lambda row: row.key)

    def close(self) -> None:
        self._file.close()


@contextmanager
def open_journal(path: Path, settings: Mapping[str, Any], sides: Mapping[str, Mapping[str, Any]]) -> Iterator[Journal]:
    """Begin an evaluation, or go on with the one that lies there; nobody else may meanwhile.

    Args: settings: name -> value, the same for every side; sides: name of a side -> what it is. Further sides may join.
    Raises: ConfigError: another value than that which was played with. LaunchError: somebody is at work there, or it
    is something else, of another format, or cannot be written.
    """
    if path.exists() and not (path / "settings.json").is_file() and (not path.is_dir() or any(path.iterdir())):
        raise LaunchError("--out", str(path), "holds something else", "give a new directory, or that of an evaluation")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LaunchError("--out", str(path), f"cannot be written ({error.strerror})", "give another one") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LaunchError("--out", str(path), "is in use by another evaluation", "wait for it") from error
        known = _settled(path, settings, sides)
        written = {"format": FORMAT, "settings": settings, "sides": known}
        write_whole(path / "settings.json", json.dumps(written, indent=2))
        journal = Journal(path)
        try:
            yield journal
        finally:
            journal.close()
    finally:
        os.close(lock)


def _settled(path: Path, settings: Mapping[str, Any], sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All sides that were ever played here.

    Raises: ConfigError: these settings are not those of before.
    """
    file = path / "settings.json"
    if not file.is_file():
        return dict(sides)
    before = json.loads(file.read_text(encoding="utf-8"))
    if (found := before.get("format", 1)) != FORMAT:
        fix = f"use the AstraFlow version that wrote {path}, or give another --out"
        raise LaunchError("evaluation.format", found, f"must be {FORMAT}", fix)
    now = json.loads(json.dumps({"settings": settings, "sides": sides}))
    old = flat(before["settings"], "")
    new = flat(now["settings"], "")
    for name, side in now["sides"].items():
        if name in before["sides"]:
            new |= flat(side, f"model {name}: ")
            old |= flat(before["sides"][name], f"model {name}: ")
    problems = [
        f"{where}={_short(new.get(where))} must stay {_short(old.get(where))} in an evaluation that goes on; "
        "set it back, or give another --out"
        for where in dict.fromkeys([*old, *new])
        if old.get(where) != new.get(where)
    ]
    if problems:
        raise ConfigError(f"{path} cannot be gone on with", problems)
    return {**before["sides"], **now["sides"]}


def flat(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """`{a: {b: 1}}` as `{a.b: 1}`."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
