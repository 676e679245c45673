"""Between torch tensors and raw bytes, without a copy where none is needed. The only torch of the weights room."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import xxhash

from astraflow.weights.delta.order import dtype_code, torch_dtype
from astraflow.weights.manifest import Part, TensorEntry, TornPart

if TYPE_CHECKING:
    import torch


def checksum(buffer: Any) -> str:
    """xxh3-128 of a buffer, in hex."""
    return xxhash.xxh3_128_hexdigest(buffer)


def raw_tensors(tensors: Mapping[str, Any]) -> dict[str, tuple[TensorEntry, memoryview]]:
    """Tensor name -> (entry with checksum, raw bytes). Views of CPU contiguous tensors, copies of all others."""
    import torch

    found: dict[str, tuple[TensorEntry, memoryview]] = {}
    for name, tensor in tensors.items():
        code = dtype_code(name, tensor)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
        found[name] = (TensorEntry(name, code, tuple(tensor.shape), checksum(raw)), raw)
    return found


def same_memory(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are one: the same elements, read in the same way. A transpose or a view as another dtype
    lies in the same memory and is another tensor."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def view_part(buffer: Any, part: Part, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Tensors of a part as views of its (writable) buffer, each verified against its checksum.

    Raises: TornPart: a tensor's bytes are not those that were published.
    """
    import torch

    whole = memoryview(buffer)
    found: dict[str, torch.Tensor] = {}
    for place in part.tensors:
        entry = entries[place.name]
        dtype = torch_dtype(entry.dtype)
        if not place.nbytes:
            found[place.name] = torch.empty(entry.shape, dtype=dtype)
            continue
        got = checksum(whole[place.offset : place.offset + place.nbytes])
        if got != entry.xxh3:
            raise TornPart(
                f"checksum of {part.name}:{place.name}",
                got,
                f"must be {entry.xxh3}",
                "the part is torn; fetch it again",
            )
        count = place.nbytes // dtype.itemsize
        found[place.name] = torch.frombuffer(buffer, dtype=dtype, count=count, offset=place.offset).view(entry.shape)
    return found
