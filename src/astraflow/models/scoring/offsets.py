"""Lengths of sequences that lie end to end, as offsets and positions."""

from __future__ import annotations

import numpy as np


def offsets(lengths: np.ndarray) -> np.ndarray:
    """[0, l0, l0 + l1, ...] of lengths [n]: [n + 1] int64."""
    out = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def ramps(lengths: np.ndarray) -> np.ndarray:
    """0..l0-1, 0..l1-1, ... of lengths [n]: [sum] int64."""
    starts = offsets(lengths)
    values: np.ndarray = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return values
