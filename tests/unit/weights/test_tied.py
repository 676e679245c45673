"""Which tensors are published once, as one is the other under a second name."""

from __future__ import annotations

from pathlib import Path

import torch

from astraflow.testing.weights import same_bits
from astraflow.training.feed.publisher import _untied
from astraflow.weights.shards.publisher import ShardedPublisher
from astraflow.weights.store import FileStore


def checkpoint() -> dict[str, torch.Tensor]:
    weights = torch.arange(16.0).view(4, 4)
    return {"a": weights, "tied": weights.view(4, 4), "turned": weights.t(), "bits": weights.view(torch.int32)}


def test_only_what_is_read_in_the_same_way_is_tied(tmp_path: Path) -> None:
    tensors = checkpoint()
    expected = {name: tensor for name, tensor in tensors.items() if name != "tied"}
    assert _untied(tensors).keys() == expected.keys()
    store = FileStore(tmp_path, "actor")
    publisher = ShardedPublisher(store)
    publisher.submit(0, tensors)
    publisher.flush()
    publisher.close()
    assert same_bits(store.fetch(0), expected)
