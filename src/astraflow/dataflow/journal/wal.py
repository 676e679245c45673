"""What SQLite will find in a write-ahead log, read without SQLite: it stops at the first bad frame and says nothing.

```
 header (32 bytes): magic, version, page size, checkpoint, salt 1, salt 2, checksum
 frame: page number, pages after commit (0: not a commit), salt 1, salt 2, checksum | one page
```

A checksum goes on from that of the frame before, whose stored value is used here, so that each frame is judged by
itself: intact frames behind a bad one tell damage from a tail that was never written to its end.
Format: https://sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

_HEADER, _FRAME = 32, 24
_MAGIC = 0x377F0682  # the last bit: checksums are of big-endian words
_CHUNK = 256  # frames examined at once


class WalReport(NamedTuple):
    """What is in a WAL file. Frames count from 1."""

    num_frames: int = 0  # frames of its newest generation, bad ones included
    num_committed: int = 0  # frames that SQLite will read
    damaged_at: int | None = None  # byte of the first bad frame that whole transactions follow
    torn: bool = False  # ends in frames of a transaction that was not committed


def walk(path: Path) -> WalReport:
    """Judge every frame of `path`; a missing or empty file has none."""
    content = np.frombuffer(path.read_bytes() if path.exists() else b"", np.uint8)
    size = len(content)
    if size < _HEADER + _FRAME:
        return WalReport()
    header = _big(content[:_HEADER])
    page = int(header[2]) if header[2] != 1 else 65536
    if page < 512 or page & (page - 1):
        return WalReport(damaged_at=0)
    count = (size - _HEADER) // (_FRAME + page)
    frames = content[_HEADER : _HEADER + count * (_FRAME + page)].reshape(count, _FRAME + page)
    heads = _big(frames[:, :_FRAME])
    kind = ">u4" if header[0] & 1 else "<u4"
    seed, good_header = header[6:8], _header_holds(content, header, kind)
    same = (heads[:, 2] == header[4]) & (heads[:, 3] == header[5])
    if not good_header:  # SQLite ignores the whole file; were there transactions in it?
        same = (heads[:, 2] == heads[0, 2]) & (heads[:, 3] == heads[0, 3])
    intact = same & _checksums_hold(frames, heads, seed, kind)
    commits = intact & (heads[:, 1] > 0)
    if not good_header:
        return WalReport(int(same.sum()), 0, 0 if commits.any() else None, torn=not commits.any())
    bad = int(np.argmin(intact)) if not intact.all() else count
    committed = int(np.flatnonzero(commits[:bad]).max(initial=-1)) + 1
    ends = np.flatnonzero(same)
    num_frames = int(ends.max()) + 1 if len(ends) else 0
    damaged = bool(commits[bad:].any())
    position = _HEADER + bad * (_FRAME + page) if damaged else None
    cut = num_frames == count and (size - _HEADER) % (_FRAME + page) > 0
    return WalReport(num_frames, committed, position, torn=not damaged and (num_frames > committed or cut))


def _header_holds(content: np.ndarray, header: np.ndarray, kind: str) -> bool:
    if int(header[0]) & ~1 != _MAGIC:
        return False
    sums = _checksum(content[None, :24].view(kind).astype(np.uint32), np.zeros((1, 2), np.uint32))
    return bool((sums[0] == header[6:8]).all())


def _checksums_hold(frames: np.ndarray, heads: np.ndarray, seed: np.ndarray, kind: str) -> np.ndarray:
    """Per frame: does its stored checksum follow from its content and the stored checksum of the frame before?"""
    stored = heads[:, 4:6]
    before = np.concatenate([seed[None], stored[:-1]])
    holds = np.empty(len(frames), bool)
    for start in range(0, len(frames), _CHUNK):
        part = slice(start, start + _CHUNK)
        summed = np.concatenate([frames[part, :8], frames[part, _FRAME:]], axis=1)
        sums = _checksum(summed.view(kind).astype(np.uint32), before[part])
        holds[part] = (sums == stored[part]).all(axis=1)
    return holds


def _checksum(words: np.ndarray, seed: np.ndarray) -> np.ndarray:
    """[F, 2n] words and [F, 2] seeds -> [F, 2]: `s0 += a + s1; s1 += b + s0` for each pair, as one linear form."""
    num = words.shape[1] // 2
    powers = _powers(num)
    first = words[:, 0::2]
    second = first + words[:, 1::2]
    weights = powers[num - 1 :: -1] if num else powers[:0]
    end = powers[num]
    return np.stack(
        [
            seed[:, 0] * end[row, 0]
            + seed[:, 1] * end[row, 1]
            + (first * weights[:, row, 0] + second * weights[:, row, 1]).sum(axis=1, dtype=np.uint32)
            for row in (0, 1)
        ],
        axis=1,
    )


@cache
def _powers(num: int) -> np.ndarray:
    """[num + 1, 2, 2]: powers of [[1, 1], [1, 2]] modulo 2**32."""
    powers = np.empty((num + 1, 2, 2), np.uint32)
    powers[0] = np.eye(2, dtype=np.uint32)
    for i in range(num):
        (a, b), (c, d) = powers[i].tolist()
        powers[i + 1] = np.array([[a + b, a + 2 * b], [c + d, c + 2 * d]], np.uint64).astype(np.uint32)
    return powers


def _big(content: np.ndarray) -> np.ndarray:
    """Big-endian 32-bit numbers along the last axis."""
    return np.ascontiguousarray(content).view(">u4").astype(np.uint32)
