"""A delta onto the tensors that a reader owns: in place, verified, and taken back when it does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import xxhash

from astraflow.weights.delta.faults import DeltaMismatch, WrongBase
from astraflow.weights.delta.order import ELEMENTS, Ints, add, dtype_code, empty, flat_bits
from astraflow.weights.delta.reader import DeltaReader
from astraflow.weights.manifest import Manifest, TensorEntry

if TYPE_CHECKING:
    import torch

_FULL = "fetch the target version in full"


def apply(tensors: dict[str, torch.Tensor], parts: Sequence[Any], held: Manifest, target: Manifest) -> list[str]:
    """Turn `tensors` from version `held` into version `target`; names of those that changed, in its order.

    Tensors are contiguous, in host memory, and change in place; those that are new or have another shape or dtype are
    replaced. The dict gets the order of `target`. Names that share memory are changed once. Nobody may read the tensors
    meanwhile.

    Raises: DamagedDelta, WrongBase, DeltaMismatch: content differs from what `target` says. The tensors are then
    as they were.
    """
    delta = DeltaReader(parts)
    if (delta.base, delta.version) != (held.version, target.version):
        raise WrongBase(
            "delta", f"{delta.base} -> {delta.version}", f"must be {held.version} -> {target.version}", _FULL
        )
    before, after = held.entries(), target.entries()
    _check_names(delta, tensors, before, after)
    application = _Application(tensors, delta)
    try:
        for name in delta.names:
            application.change(name, before.get(name), after[name])
            _verify(name, tensors[name], after[name])
        for name in application.sharing(after.keys() - delta.names):
            _verify(name, tensors[name], after[name])
    except BaseException:
        application.undo()
        raise
    in_order = {name: tensors[name] for name in after}
    tensors.clear()
    tensors.update(in_order)
    return [name for name in after if name in delta.names]


class _Application:
    """What was done so far, so that it can be taken back: differences are subtracted again, whole tensors are kept."""

    def __init__(self, tensors: dict[str, torch.Tensor], delta: DeltaReader) -> None:
        self._tensors, self._delta = tensors, delta
        self._bits: dict[str, Ints] = {}  # of tensors that changed in place
        self._num_runs: dict[str, int] = {}
        self._bits_before: dict[str, Ints] = {}
        self._replaced: dict[str, torch.Tensor | None] = {}
        self._changed: set[int] = set()  # addresses

    def change(self, name: str, before: TensorEntry | None, after: TensorEntry) -> None:
        """Bring one tensor to the new version."""
        if before is None or (before.dtype, before.shape) != (after.dtype, after.shape):
            self._replaced[name] = self._tensors.get(name)
            self._tensors[name] = empty(after.dtype, after.shape)
            self._write(name, _host_bits(name, self._tensors[name], after))
            return
        bits = _host_bits(name, self._tensors[name], after)
        if bits.ctypes.data in self._changed:
            return
        self._changed.add(bits.ctypes.data)
        self._bits[name] = bits
        if self._delta.is_full(name):
            self._bits_before[name] = bits.copy()
            self._write(name, bits)
            return
        self._num_runs[name] = 0
        for run in self._delta.runs(name):
            add(bits, run.positions, run.differences, ELEMENTS[after.dtype])
            self._num_runs[name] += 1

    def sharing(self, names: Collection[str]) -> list[str]:
        """Those of `names` whose memory was changed under another name."""
        return [name for name in names if self._tensors[name].data_ptr() in self._changed]

    def undo(self) -> None:
        """Take everything back."""
        for name, num_runs in self._num_runs.items():
            for run in islice(self._delta.runs(name), num_runs):
                add(self._bits[name], run.positions, -run.differences, self._delta.segment(name).element)
        for name, kept in self._bits_before.items():
            self._bits[name][:] = kept
        for name, tensor in self._replaced.items():
            if tensor is None:
                del self._tensors[name]
            else:
                self._tensors[name] = tensor

    def _write(self, name: str, bits: Ints) -> None:
        for start, new in self._delta.stretches(name):
            bits[start : start + len(new)] = new


def _check_names(
    delta: DeltaReader, tensors: Collection[str], before: Mapping[str, TensorEntry], after: Mapping[str, TensorEntry]
) -> None:
    """Whether the delta can lead from the one content to the other, by what is said of them."""
    if missing := before.keys() - set(tensors):
        raise WrongBase("tensor", min(missing), "is not held", _FULL)
    gone = before.keys() - after.keys()
    if not gone <= delta.removed or not delta.removed.isdisjoint(after):
        raise DeltaMismatch("delta removed", sorted(delta.removed), f"must be {sorted(gone)}", _FULL)
    if unknown := delta.names - after.keys():
        raise DeltaMismatch("delta tensor", min(unknown), "is not in the target version", _FULL)
    for name, entry in after.items():
        if name not in delta.names:
            if before.get(name) != entry:
                raise DeltaMismatch("delta tensor", name, "is not mentioned but differs", _FULL)
            continue
        segment, known = delta.segment(name), before.get(name)
        if (segment.dtype, segment.shape) != (entry.dtype, entry.shape):
            raise DeltaMismatch(
                f"delta {name}", f"{segment.dtype} {segment.shape}", f"must be {entry.dtype} {entry.shape}", _FULL
            )
        if not delta.is_full(name) and (known is None or (known.dtype, known.shape) != (entry.dtype, entry.shape)):
            raise WrongBase(f"delta {name}", "sparse", "needs a tensor of that shape and dtype to change", _FULL)


def _host_bits(name: str, tensor: torch.Tensor, entry: TensorEntry) -> Ints:
    if (dtype_code(name, tensor), tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise WrongBase(
            f"tensor {name}", f"{tensor.dtype} {tuple(tensor.shape)}", f"must be {entry.dtype} {entry.shape}", _FULL
        )
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise WrongBase(
            f"tensor {name}", str(tensor.device), "must be contiguous in host memory", "apply to the fetched tensors"
        )
    bits: Ints = flat_bits(tensor).numpy()
    return bits


def _verify(name: str, tensor: torch.Tensor, entry: TensorEntry) -> None:
    got = xxhash.xxh3_128_hexdigest(flat_bits(tensor).numpy().data if tensor.numel() else b"")
    if got != entry.xxh3:
        raise DeltaMismatch(f"checksum of {name}", got, f"must be {entry.xxh3} after the delta", _FULL)
