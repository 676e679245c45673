"""What the worker processes and the processes that they started use. Linux; elsewhere nothing is known."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_GROUP, _RESIDENT = 2, 21  # fields of /proc/<pid>/stat behind the name, proc(5)


class Usage(NamedTuple):
    """Of all processes of one group."""

    resident_bytes: int  # pages that several of them share are counted for each
    pids: list[int]


def usage_of(groups: Collection[int]) -> dict[int, Usage]:
    """Process group -> what it uses; one pass over all processes."""
    found: dict[int, Usage] = {}
    if sys.platform != "linux":
        return found
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has just ended
            continue
        group = int(fields[_GROUP])
        if group in groups:
            resident, pids = found.get(group, Usage(0, []))
            found[group] = Usage(resident + int(fields[_RESIDENT]) * _PAGE_BYTES, [*pids, int(entry.name)])
    return found


def own_bytes(usage: Usage) -> int:
    """Resident bytes with shared pages counted once. Reads more: for those of whom something is suspected."""
    total = 0
    for pid in usage.pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(b"Pss:"))
    return total
