"""System calls that boxes do without, as a filter for the kernel (seccomp): they reserve memory that no limit counts,
reach into other processes, or open parts of the kernel that plain programs do not need. Sockets are local ones."""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

# name: its number on x86-64 and on arm64 (Linux: arch/x86/entry/syscalls/syscall_64.tbl, scripts/syscall.tbl)
REFUSED = {
    "shmget": (29, 194), "msgget": (68, 186), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
}  # fmt: skip
_SOCKET = (41, 198)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and what the kernel calls it
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # of classic BPF
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_FIRST_ARGUMENT = 16  # where its lower half is in `struct seccomp_data`, on machines that begin with it
_OTHER_ABI = 0x40000000  # calls of x32, which have numbers of their own


def _filter(machine: str) -> bytes:
    """As `struct sock_filter[]`; empty: the numbers of this kind of machine are not known."""
    if machine not in MACHINES:
        return b""
    column, mark = MACHINES[machine]
    numbers = sorted(call[column] for call in REFUSED.values())
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, mark), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    steps += [(_AT_LEAST, len(numbers) + 4, 0, _OTHER_ABI)]
    steps += [(_EQUAL, len(numbers) + 3 - place, 0, number) for place, number in enumerate(numbers)]
    steps += [(_EQUAL, 0, 2, _SOCKET[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 1, socket.AF_UNIX)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL)]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


FILTER = _filter(platform.machine())


@contextmanager
def filter_file() -> Iterator[int]:
    """Number of a file from which the filter can be read once."""
    reading, writing = os.pipe()
    try:
        os.write(writing, FILTER)  # far less than a pipe holds
        os.close(writing)
        yield reading
    finally:
        os.close(reading)
