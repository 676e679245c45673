"""Messages between the ranks of a sharded trainer, over a gloo group of their own: host memory only, never its GPUs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from astraflow.errors import WeightError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 8  # bytes, so that arrays of a message can be used where they lie
_CHUNK_BYTES = 1 << 30

T = TypeVar("T", bound=msgspec.Struct)


class RankLost(WeightError):
    """A rank died, or did not do its part in time. The group is of no use any more."""

    exit_code = 3  # of a rank that ends because another one is gone


class Exchange:
    """The group. Made on all of its ranks at once; then used by one thread of each.

    Args: ranks: global ranks that hold parts of the model, of which the lowest leads; None: all of the default group,
    or this process alone where there is none. timeout_s: how long a message is waited for.
    """

    def __init__(self, ranks: Sequence[int] | None, timeout_s: float) -> None:
        import torch.distributed as dist

        self._timeout_s = timeout_s
        self._group: Any = None
        self.rank, self.size = 0, 1
        if not (dist.is_available() and dist.is_initialized()):
            return
        members = list(range(dist.get_world_size())) if ranks is None else sorted(ranks)
        if dist.get_rank() not in members:
            raise WeightError("ranks", members, f"must contain rank {dist.get_rank()}", "publish on its ranks only")
        try:
            self._group = dist.new_group(
                members, timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True
            )
        except RuntimeError as error:
            raise RankLost(
                f"rank {dist.get_rank()}: group of ranks {members}", f"not complete ({str(error).splitlines()[0]})",
                f"must be there within timeout_s={timeout_s:g}", "make the publisher on all of them at once",
            ) from error  # fmt: skip
        self.rank, self.size = members.index(dist.get_rank()), len(members)

    @property
    def leads(self) -> bool:
        """This rank keeps the host copy of the model and writes the store."""
        return self.rank == 0

    def send(self, to: int, head: msgspec.Struct, arrays: Sequence[np.ndarray[Any, Any]] = ()) -> None:
        """One message to rank `to` of the group. Raises RankLost."""
        encoded = msgspec.json.encode(head)
        payload = bytearray(sum(_padded(array.nbytes) for array in arrays))
        at = 0
        for array in arrays:
            payload[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).data
            at += _padded(array.nbytes)
        lengths = struct.pack("<2q", len(encoded), len(payload))
        for buffer in (bytearray(lengths), bytearray(encoded), payload):
            self._move(to, buffer, sends=True)

    def receive(self, source: int, kind: type[T]) -> tuple[T, memoryview]:
        """The next message of rank `source` of the group: its head, and the bytes of its arrays. Raises RankLost."""
        lengths = self._move(source, bytearray(16), sends=False)
        num_head, num_payload = struct.unpack("<2q", lengths)
        head = self._move(source, bytearray(num_head), sends=False)
        payload = self._move(source, bytearray(num_payload), sends=False)
        return msgspec.json.decode(head, type=kind), memoryview(payload)

    def close(self) -> None:
        """Leave the group."""
        import torch.distributed as dist

        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _move(self, other: int, buffer: bytearray, *, sends: bool) -> bytearray:
        import torch
        import torch.distributed as dist

        if not buffer:
            return buffer
        whole: torch.Tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        try:
            for start in range(0, len(buffer), _CHUNK_BYTES):
                chunk = whole[start : start + _CHUNK_BYTES]
                if sends:
                    dist.send(chunk, group=self._group, group_dst=other)
                else:
                    dist.recv(chunk, group=self._group, group_src=other)
        except RuntimeError as error:
            what = "took nothing" if sends else "sent nothing"
            raise RankLost(
                f"rank {self.rank}: rank {other} of the trainer", f"{what} ({str(error).splitlines()[0]})",
                f"must do its part of every version within timeout_s={self._timeout_s:g}",
                "look at its log; publish on all ranks, and start them again together",
            ) from error  # fmt: skip
        return buffer


def split(payload: memoryview, sizes: Sequence[tuple[np.dtype[Any], int]]) -> list[np.ndarray[Any, Any]]:
    """The arrays of a message, by dtype and number of elements, where they lie."""
    found, at = [], 0
    for dtype, count in sizes:
        found.append(np.frombuffer(payload, dtype, count, at) if count else np.empty(0, dtype))
        at += _padded(count * dtype.itemsize)
    return found


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
