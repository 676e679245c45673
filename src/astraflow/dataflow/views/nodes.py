"""What the pool as a whole is doing, from the gauges and counters that nodes send with their heartbeats."""

from __future__ import annotations

from astraflow.dataflow.machine.liveness import Liveness


class PoolRates:
    """Rates between two readings; counters of a node that is new or started again count from its first reading."""

    def __init__(self) -> None:
        self._at = 0.0
        self._before: dict[str, dict[str, float]] = {}

    def read(self, live: Liveness, now: float) -> dict[str, float]:
        """`nodes/...` metrics since the last reading: tokens per second, idle fraction, and every stat summed."""
        current = {node_id: dict(seen.stats) for node_id, seen in live.nodes.items()}
        elapsed = max(now - self._at, 1e-9)
        metrics = {"nodes/count": float(len(current))}
        for stats in current.values():
            for name, value in stats.items():
                metrics[f"nodes/{name}"] = metrics.get(f"nodes/{name}", 0.0) + value
        if any("sampled_tokens" in s for s in current.values()):
            metrics["nodes/tokens_per_s"] = self._growth(current, "sampled_tokens") / elapsed
        busy = [n for n, s in current.items() if "busy_s" in s and n in self._before]
        if busy:
            share = self._growth({n: current[n] for n in busy}, "busy_s") / (elapsed * len(busy))
            metrics["nodes/idle_fraction"] = min(1.0, max(0.0, 1.0 - share))
        self._at, self._before = now, current
        return metrics

    def _growth(self, current: dict[str, dict[str, float]], name: str) -> float:
        return sum(
            max(0.0, stats.get(name, 0.0) - self._before[node_id].get(name, 0.0))
            for node_id, stats in current.items()
            if node_id in self._before
        )
