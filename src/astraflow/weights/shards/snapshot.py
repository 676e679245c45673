"""What one rank has of a version, as a copy that later steps do not change, and what changed in it since the last one.

A copy lies in host memory, or on the device of the tensor: there it costs device memory (this rank's part of the model,
twice while a version is under way), and only what changed crosses to the host.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from astraflow.errors import WeightError
from astraflow.weights.delta.encode import changes, share_unchanged
from astraflow.weights.delta.order import ELEMENTS, Ints, dtype_code, flat_bits
from astraflow.weights.shards.records import Held, Layout, Sent
from astraflow.weights.shards.regions import Region, region_of
from astraflow.weights.tensors import same_memory

if TYPE_CHECKING:
    import torch


class Change(NamedTuple):
    """One rank's block of one tensor, as it is sent: see `Sent`."""

    sent: Sent
    positions: Ints  # flat, in the whole tensor, ascending; none when it is sent whole
    values: Ints  # bit patterns, or differences of ordered ones


class Snapshot:
    """One rank's part of a version."""

    def __init__(self, version: int, held: tuple[Held, ...], blocks: dict[str, torch.Tensor], copied: Any) -> None:
        self.version, self.held = version, {entry.name: entry for entry in held}
        self._blocks = blocks
        self._copied = copied  # an event of the device; None: all is copied

    def wait(self) -> None:
        """Until all of it is copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def layout(self, base: Snapshot | None) -> Layout:
        """What is said of it to the leader."""
        held = tuple(self.held.values())
        if base is None:
            return Layout(self.version, held=held)
        numbers = sum(block.numel() for block in self._blocks.values())
        return Layout(self.version, base.version, held, share_unchanged(base._blocks, self._blocks), numbers)

    def changes(self, names: Iterable[str], base: Snapshot | None) -> list[Change]:
        """The blocks of `names`: what changed since `base`, where that is fewer bytes, else all of it.

        Raises: WeightError: a block is not here.
        """
        return [self._change(self.held[name], base) for name in names]

    def _change(self, held: Held, base: Snapshot | None) -> Change:
        if held.name not in self._blocks:
            raise WeightError(
                f"tensor {held.name}", "was not copied", "must be held by the same ranks in every version",
                "publish again, all of it is copied then",
            )  # fmt: skip
        bits, element = flat_bits(self._blocks[held.name]), ELEMENTS[held.dtype]
        if base is not None and held.name in base._blocks and base.held.get(held.name) == held:
            wide = int(np.prod(held.shape, dtype=np.int64)) > np.iinfo(np.uint32).max
            width, most = (8 if wide else 4), bits.numel() * element.nbytes
            runs, num_bytes = [], 0
            for run in changes(flat_bits(base._blocks[held.name]), bits, element):
                runs.append(run)
                num_bytes += len(run.positions) * (width + element.nbytes)
                if num_bytes >= most:
                    break
            if num_bytes < most or not most:
                positions = np.concatenate([run.positions for run in runs]) if runs else np.empty(0, np.int64)
                differences = np.concatenate([run.differences for run in runs]) if runs else np.empty(0, element.signed)
                there = held.region.to_whole(positions, held.shape).astype(np.uint64 if wide else np.uint32)
                return Change(Sent(held.name, False, len(there), wide), there, differences)
        return Change(Sent(held.name, True, bits.numel()), np.empty(0, np.uint32), bits.cpu().numpy())


def take(
    version: int,
    tensors: Mapping[str, Any],
    *,
    dtype: torch.dtype | None,
    on_device: bool,
    skip: Collection[str] = (),
) -> Snapshot:
    """Copy this rank's part of `tensors` (plain tensors and DTensors by name): the only work within the step.

    Args: dtype: floating point tensors are published in it; None: as they are. on_device: the copy stays there. skip:
    tensors of which other ranks send the same block, which are not copied.
    Raises: WeightError: a dtype or a layout that cannot be published.
    """
    import torch

    held: list[Held] = []
    blocks: dict[str, torch.Tensor] = {}
    first_names: dict[Hashable, str] = {}
    copied = None
    for name, tensor in tensors.items():
        block, region = _local(name, tensor)
        if block is None or region is None:
            continue
        target = dtype if dtype is not None and block.is_floating_point() else block.dtype
        place = (same_memory(block), tuple(tensor.shape))
        tied_to = first_names.setdefault(place, name) if block.numel() else name
        code = dtype_code(name, torch.empty(0, dtype=target))
        held.append(Held(name, code, tuple(tensor.shape), region, "" if tied_to == name else tied_to))
        if name not in skip:
            blocks[name] = _copy(block, target, on_device)
            if copied is None and block.device.type != "cpu":
                copied = torch.Event(block.device)
    if copied is not None:
        copied.record()
    return Snapshot(version, tuple(held), blocks, copied)


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor | None, Region | None]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):  # so there is no DTensor, whose import takes a second
        return tensor.detach(), Region.whole(tensor.shape)
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor.detach(), Region.whole(tensor.shape)
    region = region_of(name, tensor)
    block: torch.Tensor = tensor.to_local().detach()
    if region is not None and tuple(block.shape) != region.shape and region.num_elements + block.numel():
        raise WeightError(
            f"tensor {name}.placements", f"{tensor.placements}, block {tuple(block.shape)}",
            f"should give this rank a block {region.shape}", "redistribute it to Shard or Replicate first",
        )  # fmt: skip
    return block, region


def _copy(block: torch.Tensor, dtype: torch.dtype, on_device: bool) -> torch.Tensor:
    import torch

    if on_device or block.device.type == "cpu":
        return torch.empty(block.shape, dtype=dtype, device=block.device).copy_(block)
    # Pinned, so that the copy is a command of the device's queue: the next step waits for it there, no thread does.
    # torch keeps pinned memory that is freed for the next one.
    return torch.empty(block.shape, dtype=dtype, pin_memory=True).copy_(block.to(dtype), non_blocking=True)
