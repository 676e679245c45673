"""What the pool as a whole is doing, from the gauges and counters that nodes send with their heartbeats."""

from __future__ import annotations

from astraflow.dataflow.machine.liveness import Liveness

Stats = dict[str, float]
KV_USAGE = "kv_usage"  # a share: the highest of all counts, not the sum
UPTIME = "uptime_s"  # a node's own clock: rates are over it, so they do not depend on when they are read


class PoolRates:
    """Rates over the time between the last two reports of each node; between two reports they stay as they are."""

    def __init__(self) -> None:
        self._spans: dict[str, tuple[Stats, Stats]] = {}  # node -> the last two reports that differ in time

    def read(self, live: Liveness) -> dict[str, float]:
        """`nodes/...` metrics: tokens per second and idle fraction of the pool, the fullest memory of keys and values,
        and every other stat summed."""
        current = {node_id: dict(seen.stats) for node_id, seen in live.nodes.items()}
        metrics = {"nodes/count": float(len(current))}
        for stats in current.values():
            for name, value in stats.items():
                if name != UPTIME:
                    known = metrics.get(f"nodes/{name}", 0.0)
                    metrics[f"nodes/{name}"] = max(known, value) if name == KV_USAGE else known + value
        spans = {node_id: self._span(node_id, stats) for node_id, stats in current.items()}
        self._spans = spans
        tokens = [_rate(span, "sampled_tokens") for span in spans.values()]
        if rates := [rate for rate in tokens if rate is not None]:
            metrics["nodes/tokens_per_s"] = sum(rates)
        busy = [_rate(span, "busy_s") for span in spans.values()]
        if shares := [min(1.0, rate) for rate in busy if rate is not None]:
            metrics["nodes/idle_fraction"] = 1.0 - sum(shares) / len(shares)
        return metrics

    def _span(self, node_id: str, stats: Stats) -> tuple[Stats, Stats]:
        before, last = self._spans.get(node_id, (stats, stats))
        return (before, last) if stats.get(UPTIME) == last.get(UPTIME) else (last, stats)


def _rate(span: tuple[Stats, Stats], name: str) -> float | None:
    """Growth per second; None before a second report, or when the node does not say."""
    before, last = span
    elapsed = last.get(UPTIME, 0.0) - before.get(UPTIME, 0.0)
    if elapsed <= 0.0 or name not in last:
        return None
    return max(0.0, last[name] - before.get(name, 0.0)) / elapsed
