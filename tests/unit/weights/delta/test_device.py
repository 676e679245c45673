"""The codec on a device's tensors (torch) finds what it finds on the host's (numpy): the same bytes.

CPU tensors take the device's path here; `tests/gpu` does it on a device.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.weights.delta import encode as encoding
from astraflow.weights.delta.order import ELEMENTS


@settings(deadline=None, max_examples=100)
@given(
    code=st.sampled_from(sorted(ELEMENTS)),
    count=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    chunk=st.integers(1, 4000),
    seed=st.integers(0, 2**32),
)
def test_device_and_host_find_the_same(code, count, share, chunk, seed):
    element, rng = ELEMENTS[code], np.random.default_rng(seed)
    old = rng.integers(0, 256, count * element.nbytes, dtype=np.uint8).view(element.signed)
    new = np.where(rng.random(count) < share, rng.permutation(old), old)
    by_host = list(encoding.host_changes(old, new, element))
    by_device = list(encoding.device_changes(torch.from_numpy(old), torch.from_numpy(new), element, chunk=chunk))
    for field in ("positions", "differences"):
        host, device = ([getattr(run, field) for run in runs] for runs in (by_host, by_device))
        assert np.concatenate([*host, []]).tolist() == np.concatenate([*device, []]).tolist()
    assert all(run.positions.dtype == np.int64 for run in by_device)


def test_the_whole_encoder_gives_the_same_bytes(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    old = {name: torch.randn(300, 70, generator=generator).to(dtype) for name, dtype in
           (("a", torch.bfloat16), ("b", torch.float32), ("c", torch.float16))}  # fmt: skip
    new = {name: torch.where(torch.rand(300, 70) < 0.02, tensor * 1.01, tensor) for name, tensor in old.items()}
    new["d"] = torch.ones(5)
    on_host = list(encoding.encode(old, new, base=0, version=1))
    monkeypatch.setattr(encoding, "changes", encoding.device_changes)
    assert list(encoding.encode(old, new, base=0, version=1)) == on_host
