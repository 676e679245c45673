"""What does a delta of synthetic bf16 weights cost, in bytes and in seconds of one core?

The weights are normal, their changes a geometric number of units in the last place: no model is needed, and the share
of changed elements can be chosen. `entropy_bounds`, `other_codings` and `measure` take any pair of models.

    python -m benchmarks.delta_codec [--elements 64000000] [--shares 0.001,0.004,0.01,0.05] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from rich.console import Console

from astraflow.weights.delta.apply import apply
from astraflow.weights.delta.encode import changed_positions, encode
from astraflow.weights.delta.merge import merge
from astraflow.weights.delta.order import ELEMENTS, dtype_code, flat_bits, ordered
from astraflow.weights.delta.planes import compress
from astraflow.weights.manifest import Manifest
from astraflow.weights.tensors import raw_tensors
from benchmarks.harness import table

R = TypeVar("R")
Tensors = Mapping[str, torch.Tensor]
TENSORS = 16
ZSTD_BYTES = 1 << 20  # the xor is compressed in pieces of this size


class Bounds(NamedTuple):
    """What an ideal coder needs that knows each tensor's share of changes and how often each difference occurs."""

    num_changed: int
    positions: float  # bytes per changed element
    values: float


def entropy_bounds(old: Tensors, new: Tensors) -> Bounds:
    """Positions: N H(n / N) bits for n of a tensor's N elements. Values: the entropy of the differences of all."""
    num_changed, position_bits = 0, 0.0
    counts: Counter[tuple[int, int]] = Counter()
    for name, tensor in new.items():
        element = ELEMENTS[dtype_code(name, tensor)]
        before, after = flat_bits(old[name]).numpy(), flat_bits(tensor).numpy()
        positions = changed_positions(before, after)
        share = len(positions) / max(1, len(after))
        if 0 < share < 1:
            position_bits -= len(after) * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
        differences = ordered(after[positions], element) - ordered(before[positions], element)
        found, times = np.unique(differences, return_counts=True)
        counts.update({(element.nbytes, int(d)): int(n) for d, n in zip(found, times, strict=True)})
        num_changed += len(positions)
    times = np.array(list(counts.values()), float)
    value_bits = float(-(times * np.log2(times / max(1, num_changed))).sum())
    return Bounds(num_changed, position_bits / 8 / max(1, num_changed), value_bits / 8 / max(1, num_changed))


def other_codings(old: Tensors, new: Tensors, num_changed: int) -> dict[str, int]:
    """Bytes of the same pair as: all of it; zstd of the xor of the bits; an index of 4 or 8 bytes and the new value."""
    nbytes = sum(tensor.nbytes for tensor in new.values())
    width = max(tensor.element_size() for tensor in new.values())
    xored = 0
    for name, tensor in new.items():
        bits = (flat_bits(old[name]) ^ flat_bits(tensor)).numpy().view(np.uint8)
        xored += sum(len(compress(bits[at : at + ZSTD_BYTES].data)) for at in range(0, len(bits), ZSTD_BYTES))
    return {"full": nbytes, "xor": xored, "u32": num_changed * (4 + width), "u64": num_changed * (8 + width)}


def measure(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], rounds: int) -> dict[str, Any]:
    """One row: bytes of a pair, and gigabytes of model per second of one core (processor time, median of `rounds`)."""
    nbytes = sum(tensor.nbytes for tensor in new.values())
    bounds = entropy_bounds(old, new)
    others = other_codings(old, new, bounds.num_changed)
    held, target = _manifest(0, old), _manifest(1, new)
    encode_s, parts = _timed(lambda: list(encode(old, new, base=0, version=1)), rounds)
    forth = [list(encode(old, new, base=0, version=1)), list(encode(new, old, base=1, version=0))]
    own = {name: tensor.clone() for name, tensor in old.items()}
    copy_s, _ = _timed(lambda: [own[name].copy_(tensor) for name, tensor in old.items()], rounds)
    apply_s = []
    for _ in range(rounds):  # there and back: both ways are an apply
        apply_s += [_timed(lambda: apply(own, forth[0], held, target), 1)[0]]
        apply_s += [_timed(lambda: apply(own, forth[1], target, held), 1)[0]]
    again = list(encode(old, new, base=1, version=2))
    merge_s, _ = _timed(lambda: list(merge([forth[0], again])), rounds)
    size = sum(map(len, parts))
    return {
        "changed": bounds.num_changed / sum(tensor.numel() for tensor in new.values()),
        "bytes per change": size / max(1, bounds.num_changed), "bound": bounds.positions + bounds.values,
        "of positions": bounds.positions, "of values": bounds.values, "delta MB": size / 1e6,
        **{f"{name} / delta": nbytes_other / size for name, nbytes_other in others.items()},
        "encode GB/s": nbytes / encode_s / 1e9, "apply GB/s": nbytes / statistics.median(apply_s) / 1e9,
        "merge of 2 GB/s": nbytes / merge_s / 1e9, "memcpy GB/s": nbytes / copy_s / 1e9,
    }  # fmt: skip


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
    rows = [measure(*synthetic(chosen.elements, float(s)), chosen.rounds) for s in chosen.shares.split(",")]
    Console(width=200).print(table("delta of synthetic bf16 weights", rows))


if __name__ == "__main__":
    main()
