"""Small tensors, for tests of anything that publishes or fetches."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Four small tensors of three dtypes, one of them a scalar; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(61, 16, generator=generator).to(torch.bfloat16),
        "layer.0.weight": torch.randn(16, 16, generator=generator),
        "layer.0.bias": torch.randn(16, generator=generator).to(torch.float16),
        "scale": torch.tensor(1.5),
    }


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Equal names, dtypes, shapes and bytes (so NaN equals itself)."""
    return left.keys() == right.keys() and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
        for a, b in ((left[name], right[name]) for name in left)
    )
