"""Two versions of a model -> the delta between them: which elements changed, and by how much.

Tensors are compared on the device where the new one lies; only what changed leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from astraflow.weights.delta.order import ELEMENTS, Element, Ints, dtype_code, flat_bits, ordered, zigzag
from astraflow.weights.delta.planes import entropy_bits, number_bits
from astraflow.weights.delta.reader import Run, Stretch
from astraflow.weights.delta.writer import Described, PartWriter
from astraflow.weights.files.layout import PART_BYTES

if TYPE_CHECKING:
    import torch

HOST_CHUNK_BYTES = 2 << 20
"""What is compared at once stays in the cache (measured: 1.4 times as fast as the whole tensor)."""

DEVICE_CHUNK = 1 << 26
"""Elements compared at once on a device: torch.nonzero counts in 32 bits there, and needs 8 bytes per element."""

_SAMPLE_ROWS, _SAMPLE_WIDTH = 64, 1024
_SPARSE_SHARE = 1 / 8
_GLANCE = 1024  # elements of a tensor


def encode(
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    base: int,
    version: int,
    part_bytes: int = PART_BYTES,
) -> Iterator[bytes]:
    """Parts of the delta from `old` (version `base`) to `new` (version `version`), each as soon as it is full.

    Both are read and must not change until the last part is out. They may lie on a device. A tensor that is new or has
    another shape or dtype travels whole, as does one whose changes would not be fewer bytes; an equal one is not
    mentioned.

    Raises: WeightError: a dtype that cannot be published.
    """
    writer = PartWriter(base, version, old.keys() - new.keys(), part_bytes=part_bytes)
    for name, tensor in new.items():
        what = Described(name, dtype_code(name, tensor), tuple(tensor.shape))
        element = ELEMENTS[what.dtype]
        before, after = old.get(name), flat_bits(tensor)
        if before is None or before.dtype != tensor.dtype or before.shape != tensor.shape:
            yield from writer.full(what, stretches(after))
            continue
        known = flat_bits(before)
        if sparse_pays(sample(known), sample(after), element):
            yield from writer.sparse(what, changes(known, after, element))
        else:
            yield from writer.full(what, stretches(after))
    yield writer.close()


def share_unchanged(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> float:
    """Share of the elements of `new` that are as they were, judged by a small sample of each tensor; 0 to 1."""
    same = total = 0.0
    for name, tensor in new.items():
        count, before = tensor.numel(), old.get(name)
        total += count
        if not count or before is None or before.dtype != tensor.dtype or before.shape != tensor.shape:
            continue
        step = max(1, count // _GLANCE)
        known, after = flat_bits(before)[::step], flat_bits(tensor)[::step]
        same += count * float((known.to(after.device) == after).float().mean())
    return same / total if total else 1.0


def changes(old: torch.Tensor, new: torch.Tensor, element: Element) -> Iterator[Run]:
    """Changed elements of `new` against `old`, both [n] bit patterns (`flat_bits`)."""
    old = old.to(new.device)
    if new.device.type == "cpu":
        yield from host_changes(old.numpy(), new.numpy(), element)
    else:
        yield from device_changes(old, new, element)


def device_changes(old: torch.Tensor, new: torch.Tensor, element: Element, chunk: int = DEVICE_CHUNK) -> Iterator[Run]:
    """`changes` of [n] by torch: only positions and differences of changed elements leave the device."""
    import torch

    for start in range(0, new.numel(), chunk):
        before, after = old[start : start + chunk], new[start : start + chunk]
        positions = torch.nonzero(before != after).view(-1)
        differences = ordered(after[positions], element) - ordered(before[positions], element)
        # Within a chunk a position has 26 bits: half of its bytes stay where they are.
        within = positions.to(torch.int32).cpu().numpy()
        yield Run(within.astype(np.int64) + start, differences.cpu().numpy())


def host_changes(old: Ints, new: Ints, element: Element, chunk_bytes: int = HOST_CHUNK_BYTES) -> Iterator[Run]:
    """`changes` by numpy, which is two to four times as fast as torch there."""
    chunk = chunk_bytes // element.nbytes
    for start in range(0, len(new), chunk):
        before, after = old[start : start + chunk], new[start : start + chunk]
        positions = changed_positions(before, after)
        differences = ordered(after[positions], element) - ordered(before[positions], element)
        positions += start
        yield Run(positions, differences)


def changed_positions(old: Ints, new: Ints) -> Ints:
    """Positions [n] int64 at which the two differ. Few do, so words of 8 bytes are compared first."""
    per_word = 8 // new.itemsize
    in_words = len(new) // per_word * per_word
    if per_word == 1 or not in_words:
        return np.flatnonzero(old != new)
    old_words, new_words = old[:in_words].view(np.int64), new[:in_words].view(np.int64)
    words = np.flatnonzero(old_words != new_words)
    if len(words) * 4 > len(new_words):
        return np.flatnonzero(old != new)
    within = np.flatnonzero(old_words[words].view(new.dtype) != new_words[words].view(new.dtype))
    positions = words[within // per_word] * per_word + within % per_word
    tail = np.flatnonzero(old[in_words:] != new[in_words:]) + in_words
    return np.concatenate([positions, tail]) if len(tail) else positions


def sparse_pays(before: Ints, after: Ints, element: Element) -> bool:
    """Whether changed elements are fewer bytes than the tensor: judged by a `sample` of it before and after.

    Seldom changed is sparse without more ado. Otherwise the two forms are compared by the bits that ideal coders need.
    """
    positions = np.flatnonzero(before != after)
    if len(positions) <= len(after) * _SPARSE_SHARE:
        return True
    differences = ordered(after[positions], element) - ordered(before[positions], element)
    gaps = (np.diff(positions, prepend=-1) - 1).astype("<u2")
    return number_bits(gaps) + number_bits(zigzag(differences)) < entropy_bits(after)


def sample(flat: torch.Tensor) -> Ints:
    """At most 65,536 of [n] bit patterns, in stretches that are spread over them. It may be a view."""
    count = flat.numel()
    if count > _SAMPLE_ROWS * _SAMPLE_WIDTH:
        step = count // _SAMPLE_ROWS
        flat = flat[: _SAMPLE_ROWS * step].view(_SAMPLE_ROWS, step)[:, :_SAMPLE_WIDTH].reshape(-1)
    found: Ints = flat.cpu().numpy()
    return found


def stretches(flat: torch.Tensor, chunk: int = DEVICE_CHUNK) -> Iterator[Stretch]:
    """All of [n] bit patterns, on the host, so many elements at a time."""
    for start in range(0, flat.numel(), chunk):
        yield Stretch(start, flat[start : start + chunk].cpu().numpy())
