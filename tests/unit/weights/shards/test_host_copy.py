"""The leader's copy, moved on by blocks of several ranks, is what one process would have encoded."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.weights.delta.encode import encode, host_changes
from astraflow.weights.delta.order import ELEMENTS, flat_bits
from astraflow.weights.delta.reader import Run
from astraflow.weights.delta.writer import Described
from astraflow.weights.manifest import DTYPES
from astraflow.weights.shards import host_copy
from astraflow.weights.shards.host_copy import Block, HostCopy
from astraflow.weights.shards.records import Held
from astraflow.weights.shards.regions import Region
from astraflow.weights.shards.snapshot import Snapshot


def tensor_of(bits: np.ndarray, code: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, DTYPES[code][0])
    return torch.from_numpy(bits.copy()).view(dtype).reshape(shape)


@st.composite
def steps(draw):
    """dtype, shape, cuts of one dimension, and bit patterns before and after."""
    code = draw(st.sampled_from(["BF16", "F32", "F16", "F64", "I8", "U8", "F8_E4M3"]))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    element, count = ELEMENTS[code], math.prod(shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = rng.integers(0, 256, count * element.nbytes, dtype=np.uint8).view(element.signed)
    after = before.copy()
    chosen = rng.random(count) < draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    after[chosen] = rng.integers(0, 256, int(chosen.sum()) * element.nbytes, dtype=np.uint8).view(element.signed)
    return code, shape, dim, [0, *cuts, shape[dim]], before, after


@settings(deadline=None, max_examples=150)
@given(steps())
def test_blocks_of_ranks_make_the_delta_of_the_whole(step):
    code, shape, dim, cuts, *bits = step
    old, new = (tensor_of(b, code, shape) for b in bits)
    host, what = HostCopy(), Described("t", code, shape)
    snapshots = []
    for low, high in itertools.pairwise(cuts):
        region = Region(tuple(((low, high),) if at == dim else ((0, size),) for at, size in enumerate(shape)))
        held, blocks = Held("t", code, shape, region), [t.narrow(dim, low, high - low) for t in (old, new)]
        snapshots.append([Snapshot(v, (held,), {"t": block}, None) for v, block in enumerate(blocks)])
    for version, expected in enumerate((old, new)):
        host.begin(version, ["t"], encode=True)
        host.change(what, [Block(pair[0].held["t"].region, *pair[version].changes(["t"], pair[0] if version else None))
                           for pair in snapshots])  # fmt: skip
        host.end(version)
        assert torch.equal(flat_bits(host.tensors["t"]), flat_bits(expected))
    assert host.parts == list(encode({"t": old}, {"t": new}, base=0, version=1))


def test_changes_are_portioned_as_a_comparison_finds_them(monkeypatch):
    monkeypatch.setattr(host_copy, "HOST_CHUNK_BYTES", 4096)
    rng, element = np.random.default_rng(0), ELEMENTS["BF16"]
    old = rng.integers(-9, 9, 20_000).astype(np.int16)
    new = old + (rng.random(20_000) < 0.01).astype(np.int16)
    new[4000:9000] = old[4000:9000]
    found = [run for run in host_changes(old, new, element, chunk_bytes=4096) if len(run.positions)]
    whole = Run(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
    portions = [run for run in host_copy._as_compared(whole, element) if len(run.positions)]
    assert [run.positions.tolist() for run in portions] == [run.positions.tolist() for run in found]
    assert [run.differences.tolist() for run in portions] == [run.differences.tolist() for run in found]


def test_after_trouble_nothing_is_held_and_no_delta_is_made():
    host, what = HostCopy(), Described("t", "I8", (3,))
    snapshot = Snapshot(0, (Held("t", "I8", (3,), Region.whole((3,))),), {"t": torch.ones(3, dtype=torch.int8)}, None)
    block = Block(Region.whole((3,)), *snapshot.changes(["t"], None))
    for version in (0, 1):
        host.begin(version, ["t"], encode=True)
        host.change(what, [block])
        host.end(version)
    assert (host.version, len(host.parts)) == (1, 1)
    host.begin(2, ["t"], encode=True)
    assert host.version == -1
    host.drop()
    host.begin(3, ["t"], encode=True)
    host.change(what, [block])
    host.end(3)
    assert (host.version, host.parts) == (3, [])


@pytest.mark.parametrize("shape", [(), (4,), (4, 0)])
def test_all_of_a_tensor(shape):
    region = Region.whole(shape)
    assert region.shape == shape
    assert region.num_elements == math.prod(shape)
    positions = np.arange(region.num_elements)
    assert region.to_whole(positions, shape).tolist() == positions.tolist()
