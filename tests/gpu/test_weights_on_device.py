"""Weights that lie on a device: `pytest -m gpu tests/gpu`. Their speed: `python -m benchmarks.device_publishing`."""

from __future__ import annotations

import pytest
import torch

from astraflow.testing.weights import same_bits
from astraflow.weights.delta.encode import encode
from astraflow.weights.shards.publisher import ShardedPublisher
from astraflow.weights.store import FileStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn]


def pair(dtype: torch.dtype, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Any bits, on the device."""
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randint(0, 256, (64, 8 * 1021), generator=generator, dtype=torch.uint8) for _ in range(2))
    moved = torch.rand(64, 1021, generator=generator).repeat_interleave(8, 1) < share
    new = torch.where(moved, new, old)
    device = torch.accelerator.current_accelerator()
    return old.to(device).view(dtype), new.to(device).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_a_delta_of_device_tensors_has_the_bytes_of_one_of_host_tensors(dtype, share):
    old, new = pair(dtype, share)
    on_device = list(encode({"t": old}, {"t": new}, base=0, version=1))
    assert on_device == list(encode({"t": old.cpu()}, {"t": new.cpu()}, base=0, version=1))


@pytest.mark.parametrize("on_device", [False, True])
def test_a_version_is_what_the_device_had_when_it_was_given(tmp_path, on_device):
    store = FileStore(tmp_path, "actor", full_every=3)
    publisher = ShardedPublisher(store, on_device=on_device, dtype=torch.bfloat16)
    tensors = {f"t{at}": pair(torch.float32, 0.0)[0].nan_to_num() for at in range(8)}
    expected = []
    for version in range(5):
        expected.append({name: tensor.bfloat16().cpu() for name, tensor in tensors.items()})
        publisher.submit(version, tensors)
        for tensor in tensors.values():  # queued behind the copy, before it is done
            tensor[:, version::97] *= 1.01
    publisher.flush()
    publisher.close()
    for version, whole in enumerate(expected):
        assert same_bits(store.fetch(version), whole), version
    assert [info.base for info in store.infos().values()] == [-1, 0, 1, 2, 3]
