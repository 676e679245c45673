"""What does a delta of synthetic bf16 weights cost, in bytes and in seconds of one core?

The weights are normal, their changes a geometric number of units in the last place: no model is needed, and the share
of changed elements can be chosen. `measure` takes any pair of models; `bench_weights` gives it real ones.

    python -m benchmarks.delta_codec [--elements 64000000] [--shares 0.001,0.004,0.01,0.05] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from rich.console import Console

from astraflow.weights.delta.apply import apply
from astraflow.weights.delta.encode import changed_positions, encode
from astraflow.weights.delta.merge import merge
from astraflow.weights.delta.order import ELEMENTS, Ints, dtype_code, flat_bits, ordered
from astraflow.weights.delta.planes import compress
from astraflow.weights.manifest import Manifest
from astraflow.weights.tensors import raw_tensors
from benchmarks.harness import table

R = TypeVar("R")
Tensors = Mapping[str, torch.Tensor]
TENSORS = 16
ZSTD_BYTES = 1 << 20  # the xor is compressed in pieces of this size
MANTISSA_BITS = {"BF16": 7, "F16": 10, "F32": 23}


class Bounds(NamedTuple):
    """Bytes that ideal coders need for the changes of a pair."""

    num_changed: int
    positions: float  # one that knows each tensor's share of changes
    values: float  # one that knows how often each difference occurs
    known: float  # both, by one that also knows the exponents of the old values: no merging without the models then


class Measured(NamedTuple):
    """One pair of versions, or several added up. Bytes, and seconds of one core."""

    elements: int
    nbytes: int
    changed: int
    positions: float  # as in Bounds
    values: float
    known: float
    delta: int  # as it travels, header and checksum included
    xor: int  # zstd of the xor of the bits
    u32: int  # an index of 4 bytes and the new value of each changed element
    u64: int
    encode_s: float
    apply_s: float  # with the checksum of every tensor that changed
    merge_s: float  # of this delta and one more of its size
    copy_s: float  # memcpy of all tensors, one by one

    def row(self) -> dict[str, Any]:
        """The figures that are compared."""
        each, size = max(1, self.changed), max(1, self.delta)
        row = {
            "changed": self.changed / max(1, self.elements), "bytes per change": self.delta / each,
            "bound": (self.positions + self.values) / each, "of positions": self.positions / each,
            "of values": self.values / each, "old exponents known": self.known / each,
            "full MB": self.nbytes / 1e6, "delta MB": self.delta / 1e6,
            **{f"{name} / delta": getattr(self, name) / size for name in ("xor", "u32", "u64")},
        }  # fmt: skip
        for name in ("encode", "apply", "merge", "copy"):
            seconds = getattr(self, f"{name}_s")
            row[f"{name} GB/s"] = self.nbytes / seconds / 1e9 if seconds else None
        return row


def entropy_bounds(old: Tensors, new: Tensors) -> Bounds:
    """Positions: N H(n / N) bits for n of a tensor's N elements. Values: the entropy of the differences of all.
    Known: the same two within all elements of one exponent."""
    position_bits = 0.0
    differences, classes, total = [], [], np.zeros(1 << 16, np.int64)
    for name, tensor in new.items():
        code = dtype_code(name, tensor)
        before, after = flat_bits(old[name]).numpy(), flat_bits(tensor).numpy()
        exponents = _exponents(before, code)
        positions = changed_positions(before, after)
        position_bits += _choice_bits(np.array([len(positions)]), np.array([len(after)]))
        total += np.bincount(exponents, minlength=len(total))
        element = ELEMENTS[code]
        differences.append((ordered(after[positions], element) - ordered(before[positions], element)).astype(np.int64))
        classes.append(exponents[positions])
    values, of = np.concatenate(differences), np.concatenate(classes).astype(np.int64)
    within = _entropy_bits(of * (1 << 40) + values) - _entropy_bits(of)
    known = _choice_bits(np.bincount(of, minlength=len(total)), total) + within
    return Bounds(len(values), position_bits / 8, _entropy_bits(values) / 8, known / 8)


def _exponents(bits: Ints, code: str) -> Ints:
    # Integers have none: all are of one class.
    shift = MANTISSA_BITS.get(code)
    if shift is None:
        return np.zeros(len(bits), np.int64)
    unsigned = bits.view(f"u{bits.itemsize}") & ((1 << (8 * bits.itemsize - 1)) - 1)
    return (unsigned >> shift).astype(np.int64)


def _choice_bits(chosen: Ints, of: Ints) -> float:
    """Sum of N H(n / N)."""
    share = chosen / np.maximum(1, of)
    inner, many = share[(share > 0) & (share < 1)], of[(share > 0) & (share < 1)]
    return float(-(many * (inner * np.log2(inner) + (1 - inner) * np.log2(1 - inner))).sum())


def _entropy_bits(symbols: Ints) -> float:
    times = np.unique(symbols, return_counts=True)[1]
    return float(-(times * np.log2(times / max(1, len(symbols)))).sum())


def other_codings(old: Tensors, new: Tensors, num_changed: int) -> dict[str, int]:
    """Bytes of the same pair as: zstd of the xor of the bits; an index of 4 or 8 bytes and the new value."""
    width = max(tensor.element_size() for tensor in new.values())
    xored = 0
    for name, tensor in new.items():
        bits = (flat_bits(old[name]) ^ flat_bits(tensor)).numpy().view(np.uint8)
        xored += sum(len(compress(bits[at : at + ZSTD_BYTES].data)) for at in range(0, len(bits), ZSTD_BYTES))
    return {"xor": xored, "u32": num_changed * (4 + width), "u64": num_changed * (8 + width)}


def measure(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], rounds: int) -> Measured:
    """Bytes of a pair, and processor time of this thread (median of `rounds`)."""
    bounds = entropy_bounds(old, new)
    held, target = _manifest(0, old), _manifest(1, new)
    encode_s, there = _timed(lambda: list(encode(old, new, base=0, version=1)), rounds)
    back = list(encode(new, old, base=1, version=0))
    own = {name: tensor.clone() for name, tensor in old.items()}
    copy_s, _ = _timed(lambda: [own[name].copy_(tensor) for name, tensor in old.items()], rounds)
    apply_s = []
    for _ in range(rounds):  # there and back: both ways are an apply
        apply_s += [_timed(lambda: apply(own, there, held, target), 1)[0]]
        apply_s += [_timed(lambda: apply(own, back, target, held), 1)[0]]
    again = list(encode(old, new, base=1, version=2))
    merge_s, _ = _timed(lambda: list(merge([there, again])), rounds)
    return Measured(
        elements=sum(tensor.numel() for tensor in new.values()), nbytes=sum(tensor.nbytes for tensor in new.values()),
        changed=bounds.num_changed, positions=bounds.positions, values=bounds.values, known=bounds.known,
        delta=sum(map(len, there)), **other_codings(old, new, bounds.num_changed),
        encode_s=encode_s, apply_s=statistics.median(apply_s), merge_s=merge_s, copy_s=copy_s,
    )  # fmt: skip


def pooled(pairs: Sequence[Measured]) -> Measured:
    """All of them together: sums, so that ratios are those of the whole chain."""
    return Measured(*(sum(column) for column in zip(*pairs, strict=True)))


def synthetic(elements: int, share: float, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A bf16 model of equal layers and the next version of it."""
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for number in range(TENSORS):
        count = elements // TENSORS
        before = (torch.from_numpy(rng.standard_normal(count, dtype=np.float32)) * 0.02).bfloat16()
        bits = flat_bits(before).numpy().copy()
        changed = np.flatnonzero(rng.random(count, dtype=np.float32) < share)
        steps = rng.geometric(0.8, len(changed)) * rng.choice([-1, 1], len(changed))
        element = ELEMENTS["BF16"]
        bits[changed] = ordered(ordered(bits[changed], element) + steps.astype(np.int16), element)
        old[f"layers.{number}"], new[f"layers.{number}"] = before, torch.from_numpy(bits).view(torch.bfloat16)
    return old, new


def _manifest(version: int, tensors: Tensors) -> Manifest:
    entries = tuple(entry for entry, _ in raw_tensors(tensors).values())
    return Manifest(policy="actor", version=version, parent=version - 1, tensors=entries, parts=())


def _timed(work: Callable[[], R], rounds: int) -> tuple[float, R]:
    # Processor time of this thread: others on the machine do not count.
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        result = work()
        times.append(time.thread_time() - start)
    return statistics.median(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=64_000_000)
    parser.add_argument("--shares", default="0.001,0.004,0.01,0.05")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(*synthetic(chosen.elements, float(s)), chosen.rounds).row() for s in chosen.shares.split(",")]
    Console(width=200).print(table("delta of synthetic bf16 weights", rows))


if __name__ == "__main__":
    main()
