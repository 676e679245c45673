"""A small model whose versions differ in a few elements, and a store that holds some of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from astraflow.weights.files.build import Base
from astraflow.weights.store import FileStore


def model(version: int) -> dict[str, torch.Tensor]:
    """64 kB of bfloat16, of which 50 elements change with every version."""
    weights = torch.randn(32_768, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for step in range(1, version + 1):
        chosen = torch.randint(32_768, (50,), generator=torch.Generator().manual_seed(step))
        weights.view(torch.int16)[chosen] += 1
    return {"w": weights, "norm": torch.full((8,), float(version))}


def publish(store: FileStore, versions: Iterable[int], files: tuple[Path, ...] = ()) -> None:
    """As a trainer does; the first of them travels whole, the others as their changes."""
    base: Base | None = None
    for version in versions:
        tensors = model(version)
        content = store.publish(version, tensors, files, base=base)
        base = Base(version, tensors, {entry.name: entry.xxh3 for entry in content.tensors})
