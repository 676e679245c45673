"""Snapshots as files of their own: written in a thread, whole or not at all, twice, with a checksum.

```
 snapshot-<command>.a, .b:   astraflow-snapshot 2 <xxh3 of the rest>\\n  {"seq", "now", "meta"}\\n  state
```

Two copies, because the commands that a snapshot contains are deleted: a byte that flips in one of them costs nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from astraflow.durable import sync_path
from astraflow.errors import JournalError

_MAGIC = b"astraflow-snapshot 2 "
COPIES = (".a", ".b")


class Snapshot(NamedTuple):
    """The machine's state after command `seq` at run time `now`, and what the journal belongs to."""

    seq: int
    now: float
    meta: dict[str, str]
    state: bytes


class _Header(msgspec.Struct):
    seq: int
    now: float
    meta: dict[str, str]


def write_snapshot(directory: Path, snapshot: Snapshot) -> None:
    """Both copies are on the disk when it returns; older snapshots stay. For any thread.

    Raises: JournalError: the disk is full or failed; no copy was added.
    """
    rest = msgspec.json.encode(_Header(snapshot.seq, snapshot.now, snapshot.meta)) + b"\n"
    digest = xxhash.xxh3_64()
    digest.update(rest)
    digest.update(snapshot.state)
    head = _MAGIC + digest.hexdigest().encode() + b"\n" + rest
    paths = [directory / f"snapshot-{snapshot.seq:012d}{copy}" for copy in COPIES]
    drafts = [path.with_suffix(path.suffix + ".new") for path in paths]
    try:
        for draft in drafts:
            with draft.open("wb") as file:
                file.write(head)
                file.write(snapshot.state)
                file.flush()
                os.fsync(file.fileno())
        for draft, path in zip(drafts, paths, strict=True):
            draft.replace(path)
        sync_path(directory)
    except OSError as error:
        for draft in drafts:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        raise JournalError(
            "snapshot", str(paths[0]), f"cannot be written ({error.strerror})", "make room on the disk"
        ) from error


def read_snapshot(path: Path) -> Snapshot | None:
    """None: damaged."""
    content = memoryview(path.read_bytes())
    start = len(_MAGIC) + 17
    if bytes(content[: len(_MAGIC)]) != _MAGIC or bytes(content[start - 1 : start]) != b"\n":
        return None
    rest = content[start:]
    if xxhash.xxh3_64_hexdigest(rest).encode() != bytes(content[len(_MAGIC) : start - 1]):
        return None
    line = bytes(rest).index(b"\n")
    header = msgspec.json.decode(rest[:line], type=_Header)
    return Snapshot(header.seq, header.now, header.meta, bytes(rest[line + 1 :]))


def snapshot_files(directory: Path) -> list[tuple[int, Path]]:
    """(command, file) of every whole copy, newest first."""
    found = [(int(p.stem.partition("-")[2]), p) for c in COPIES for p in directory.glob(f"snapshot-[0-9]*{c}")]
    return sorted(found, key=lambda x: (-x[0], x[1].suffix))


def delete_snapshots(directory: Path, before: int) -> None:
    """Forget snapshots older than that of command `before`, and drafts that a kill left."""
    for seq, path in snapshot_files(directory):
        if seq < before:
            path.unlink(missing_ok=True)
    for path in directory.glob("snapshot-*.new"):
        path.unlink(missing_ok=True)
