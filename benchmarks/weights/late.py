"""A step of a run that has gone on for long, simulated from the weights that it began with.

A run begins with float32 masters exactly at their bfloat16 values, and must move half a unit in the last place before
one is rounded elsewhere: early steps change fewer elements than later ones, where masters lie anywhere between two
roundings. Here they do, and each moves by the learning rate, as AdamW moves it while its gradient keeps its size.
"""

from __future__ import annotations

import torch

from benchmarks.weights.training import Tensors

_SMALLEST = 2.0**-126


def late_pair(tensors: Tensors, lr: float, seed: int = 0) -> tuple[Tensors, Tensors]:
    """Two bfloat16 versions, one step apart; their differences are not those of any training."""
    generator = torch.Generator().manual_seed(seed)
    old, new = {}, {}
    for name, tensor in tensors.items():
        values = tensor.float()
        unit = torch.exp2(torch.floor(torch.log2(values.abs().clamp_min(_SMALLEST))) - 7)
        master = values + (torch.rand(values.shape, generator=generator) - 0.5) * unit
        sign = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
        old[name], new[name] = master.bfloat16(), (master + sign * lr).bfloat16()
    return old, new


def learning_rate(words: tuple[str, ...]) -> float | None:
    """Of the overrides of a run, if they say one."""
    return next((float(word.partition("=")[2]) for word in words if ".optimizer.lr=" in word), None)
