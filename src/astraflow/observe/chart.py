"""Curves as text, for the end of a run and for a page that has no pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from astraflow.observe.summary import Row, rewards_of, successes_of

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def terminal_curve(rows: Sequence[Row], *, width: int = 60, height: int = 4) -> str:
    """Reward and success over the steps of a run, each as a block chart with its range at the left."""
    kind, successes = successes_of(rows)
    charts = [("reward (training)", rewards_of(rows)), (f"success ({kind})", successes)]
    return "\n".join(_chart(title, points, width, height) for title, points in charts if points)


def bars(counts: Mapping[str, int], *, width: int = 40) -> str:
    """A histogram, one line per value."""
    total, widest = sum(counts.values()), max(map(len, counts), default=0)
    lines = []
    for value, count in counts.items():
        share = count / total if total else 0.0
        lines.append(f"{value:>{max(4, widest)}}  {'█' * round(share * width):<{width}}  {count:>8}  {share:6.1%}")
    return "\n".join(lines)


def _chart(title: str, points: Sequence[tuple[int, float, float]], width: int, height: int) -> str:
    steps = np.array([step for step, _, _ in points], np.float64)
    values = np.array([value for _, _, value in points], np.float64)
    columns = _columns(steps, values, width)
    low = min(0.0, float(values.min()))
    high = max(0.0, float(values.max()))
    high = high if high > low else low + 1.0  # all are 0
    eighths = np.rint((columns - low) / (high - low) * height * 8).astype(int)
    lines = [f"{title}: {values[0]:.3g} at step {int(steps[0])}, {values[-1]:.3g} at step {int(steps[-1])}"]
    for line in reversed(range(height)):
        label = f"{high:8.3g}" if line == height - 1 else f"{low:8.3g}" if line == 0 else " " * 8
        lines.append(f"{label} │" + "".join(_EIGHTHS[min(8, max(0, e - 8 * line))] for e in eighths).rstrip())
    return "\n".join(lines)


def _columns(steps: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """One value per column: the mean of the points that fall into it, a straight line where none does."""
    if len(values) == 1 or steps[-1] == steps[0]:
        return np.full(1, values.mean())
    place = (steps - steps[0]) / (steps[-1] - steps[0]) * (width - 1)
    column = np.rint(place).astype(int)
    counts = np.bincount(column, minlength=width)
    sums = np.bincount(column, weights=values, minlength=width)
    filled = counts > 0
    return np.interp(np.arange(width), np.flatnonzero(filled), sums[filled] / counts[filled])
